"""Stepping an engine until all is decoded, and what its steps say of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_async.request import StepReport

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine


def drive(engine: DynamicInferenceEngine) -> Iterator[dict[str, Any]]:
    """The result of each step until no request is unfinished; a caller may stop before."""
    while engine.has_unfinished_requests():
        yield engine.step_modern()


def step_summary(reports: Iterable[StepReport]) -> dict[str, Any]:
    """Committed steps in short, plain JSON types: ``tickets`` as [first, last] of each run without
    a gap, how many had which ``effective_depth``, how many ``overlapped``, and why others did not.
    """
    tickets: list[list[int]] = []
    depths: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    overlapped = 0
    for report in reports:
        if tickets and report.ticket == tickets[-1][1] + 1:
            tickets[-1][1] = report.ticket
        else:
            tickets.append([report.ticket, report.ticket])
        depths[report.effective_depth] += 1
        overlapped += report.overlapped
        if report.reason is not None:
            reasons[report.reason] += 1
    return {
        "tickets": tickets,
        "effective_depth": {str(depth): depths[depth] for depth in sorted(depths)},
        "overlapped": overlapped,
        "not_overlapped": dict(reasons),
    }
