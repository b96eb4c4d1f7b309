"""Requests whose S needs all tokens before: grammars give it masks, Python functions its logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from megatron_async.request import DynamicInferenceEventType, DynamicInferenceRequest
from megatron_async.runner.masks import Mask
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.runner.step_program import RowProcessor
from megatron_async.step.plan import Plan, Ticket

logger = logging.getLogger(__name__)

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""From a request's token ids so far and its logits ``[vocabulary]`` to other logits."""


class Matcher(Protocol):
    """Where a request stands in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed."""

    def fill_mask(self, row: Mask) -> None:
        """Write which tokens may come next."""

    @property
    def must_end(self) -> bool:
        """Nothing but an end may come."""


class Guidance:
    """Grammars and logits processors of live requests, by scheduler key."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._matchers: dict[int, Matcher] = {}
        self._processors: dict[int, tuple[DynamicInferenceRequest, Sequence[LogitsProcessor]]] = {}

    def open(
        self, key: int, request: DynamicInferenceRequest, matcher: Matcher | None
    ) -> GrammarEnd | None:
        """Guide a request by a grammar, by the logits processors of its sampling parameters, or by
        both. Returns what follows the grammar along its tokens. From any thread."""
        processors = request.sampling_params.logits_processors
        if processors:
            self._processors[key] = request, processors
        if matcher is None:
            return None
        self._matchers[key] = matcher
        return GrammarEnd(self, key)

    def take(self, key: int, token: int) -> bool:
        """Take a committed token; True if it is the last that the grammar allows."""
        matcher = self._matchers[key]
        if matcher.accept(token) and not matcher.must_end:
            return False
        del self._matchers[key]
        return True

    def close(self, keys: Iterable[int]) -> None:
        """The last tickets of these requests have retired."""
        for key in keys:
            self._matchers.pop(key, None)
            self._processors.pop(key, None)

    def has_processors(self, plan: Plan) -> bool:
        """Some row of a plan goes through Python functions."""
        return not self._processors.keys().isdisjoint(plan.rows.keys)

    def prepare(self, ticket: Ticket) -> None:
        """Before the S of the pending ``ticket``, with all tokens of its rows before taken: write
        masks, and launch it where Python functions come first."""
        if not self._matchers and not self._processors:
            return
        masks, masked = self._runner.claim_masks(ticket)
        processors: dict[int, RowProcessor] = {}
        for row, key in ticket.plan.sampled(list(enumerate(ticket.plan.rows.keys))):
            matcher = self._matchers.get(key)
            if matcher is not None:
                matcher.fill_mask(masks[row])
                masked[row] = 1
            if key in self._processors:
                processors[row] = partial(_process, *self._processors[key])
        if processors:
            self._runner.process_logits(ticket, processors)


class GrammarEnd:
    """Follows the committed tokens of a request, and ends it where its grammar does."""

    def __init__(self, guidance: Guidance, key: int) -> None:
        self._guidance = guidance
        self._key = key

    def take(self, token: int) -> bool:
        """Take a committed token; True if it is the last."""
        return self._guidance.take(self._key, token)


def _process(
    request: DynamicInferenceRequest, processors: Sequence[LogitsProcessor], logits: torch.Tensor
) -> torch.Tensor:
    """A processor's error ends its request alone: NaN is what the device ends it for."""
    tokens = [*request.prompt_tokens, *request.generated_tokens]
    try:
        for process in processors:
            processed = process(tokens, logits)
            if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
                raise TypeError(
                    f"a logits processor returned {processed!r:.60} where logits of shape "
                    f"{tuple(logits.shape)} are due"
                )
            logits = processed.to(logits)
    except Exception as error:
        request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        logger.warning(
            "request %d ends, since a logits processor of it failed (%s: %s)",
            request.request_id,
            type(error).__name__,
            error,
        )
        return torch.full_like(logits, float("nan"))
    return logits
