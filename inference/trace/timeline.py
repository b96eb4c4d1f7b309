"""What the host did when, and the device: the two timelines of an engine, on one clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_async.device.protocol import Span
from megatron_async.request import StepReport
from megatron_async.step.plan import Plan

NO_TICKET = -1


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
    ``output`` (records, text) in it. A slice holds the ticket it is about, or :data:`NO_TICKET`
    where a plan found nothing to launch.

    Args:
        engine: stands between two steps. Its steps run on one thread.

    Attributes:
        in_flight: tickets whose tokens the host had not taken when the timeline began.
        reports: of the steps committed since then, by their tickets.
        detach: takes the timeline away; what it has seen stays.
    """

    def __init__(self, engine: Any) -> None:
        self.in_flight = engine.in_flight_count
        self.slices: list[Span] = []
        self.launches: list[Launch] = []
        self.reports: dict[int, StepReport] = {}
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


class DeviceStep(NamedTuple):
    """A span of the device; which tickets' S and F are in it, :data:`NO_TICKET` for none."""

    span: Span
    sampled: int
    forwarded: int

    @property
    def title(self) -> str:
        """The span's name with ticket numbers in it: ``S4 H2D F5``."""
        numbers = {"S": self.sampled, "F": self.forwarded}
        return " ".join(f"{word}{numbers.get(word, '')}" for word in self.span.name.split())


def device_steps(spans: Sequence[Span]) -> list[DeviceStep]:
    """Tell S and F of tickets apart. S always samples what the last F before it left pending."""
    steps = []
    pending = NO_TICKET
    for span in spans:
        words = span.name.split()
        has_sample, has_forward = "S" in words, "F" in words
        sampled = NO_TICKET
        if has_sample:
            # The first span of a timeline may sample a forward from before it.
            sampled = span.ticket - has_forward if pending == NO_TICKET else pending
        if has_forward:
            pending = span.ticket
        steps.append(DeviceStep(span, sampled, span.ticket if has_forward else NO_TICKET))
    return steps
