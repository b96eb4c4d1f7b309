"""What the host did when: an engine's counterpart of its device's timeline, on the same clock."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from megatron_async.device.protocol import Span
from megatron_async.request.request import StepReport
from megatron_async.step.plan import Plan

SLICES_OF_A_STEP = 7
"""At most: plan, pack, sample, launch, wait, output, commit."""


class Launch(NamedTuple):
    """What was launched when."""

    ticket: int
    time_ns: int
    decode_rows: int
    prefill_rows: int
    tokens: int


class HostTimeline:
    """Slices of the host's work on ``engine`` since it was attached, in the order of their ends.

    ``plan``; ``launch`` with ``pack`` (the packet) and ``sample`` in it; ``wait``; ``commit`` with
    ``output`` (records, text) in it. A slice holds the ticket it is about, or ``loop.NO_TICKET``
    where a plan found nothing to launch.

    Args:
        engine: stands between two steps. Its steps run on one thread.
        most_steps: that are kept, the last ones; None for all.

    Attributes:
        in_flight: tickets whose tokens the host had not taken when the timeline began.
        reports: of the steps committed since then, by their tickets.
        detach: takes the timeline away; what it has seen stays.
    """

    def __init__(self, engine: Any, most_steps: int | None = None) -> None:
        self.in_flight = engine.in_flight_count
        self.slices: deque[Span] = deque(maxlen=most_steps and most_steps * SLICES_OF_A_STEP)
        self.launches: deque[Launch] = deque(maxlen=most_steps)
        self.reports: dict[int, StepReport] = {}
        self._most_steps = most_steps
        self.detach = engine.observe(self)

    def on_span(self, name: str, ticket: int, start_ns: int, end_ns: int) -> None:
        """Work of the host; nanoseconds of ``time.perf_counter_ns``."""
        self.slices.append(Span(name, ticket, start_ns, end_ns))

    def on_launch(self, plan: Plan) -> None:
        """A plan was launched just now."""
        rows = plan.decode_rows, len(plan.prefills)
        self.launches.append(Launch(plan.number, time.perf_counter_ns(), *rows, plan.num_tokens))

    def on_commit(self, report: StepReport) -> None:
        """A step was committed."""
        self.reports[report.ticket] = report
        if self._most_steps is not None and len(self.reports) > self._most_steps:
            del self.reports[next(iter(self.reports))]
