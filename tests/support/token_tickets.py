"""Which step brought which token, and what its sampling parameters were."""

from __future__ import annotations

import bisect
import dataclasses

from megatron_async.request.request import DynamicInferenceRequest, StepReport
from tests.support.oracle import Ask


class TokenTickets:
    """Observer of an engine: the ticket of the step that brought each generated token."""

    def __init__(self) -> None:
        self._tickets: dict[int, list[int]] = {}
        self._live: dict[int, DynamicInferenceRequest] = {}

    def watch(self, request: DynamicInferenceRequest) -> None:
        """From its first token on."""
        self._live[request.request_id] = request
        self._tickets[request.request_id] = []

    def on_commit(self, report: StepReport) -> None:
        """The records hold the tokens of this step and of those before."""
        for request_id, request in list(self._live.items()):
            tickets = self._tickets[request_id]
            tickets += [report.ticket] * (len(request.generated_tokens) - len(tickets))
            if request.finish_reason is not None:
                del self._live[request_id]

    def begin_again(self, request: DynamicInferenceRequest) -> int:
        """It has lost all its tokens; returns how many."""
        lost = len(self._tickets[request.request_id])
        self._tickets[request.request_id] = []
        return lost

    def last_count(self, request: DynamicInferenceRequest) -> int:
        """Tokens of the last step that brought any."""
        tickets = self._tickets[request.request_id]
        return tickets.count(tickets[-1]) if tickets else 0

    def changes(self, request: DynamicInferenceRequest, ask: Ask) -> tuple[tuple[int, Ask], ...]:
        """``ask`` as it was changed, each with the first generated token that it holds for."""
        tickets = self._tickets[request.request_id]
        return tuple(
            (
                bisect.bisect_left(tickets, ticket),
                dataclasses.replace(
                    ask,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    seed=params.seed,
                ),
            )
            for ticket, params in request.sampling_spans
        )
