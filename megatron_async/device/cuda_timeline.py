"""When work ran on a CUDA stream, on the host's clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from megatron_async.device.protocol import Span

ALIGNMENTS = 64
"""Events recorded on the idle stream, of which the fastest answer aligns the clocks."""


def mean_us(work: Callable[[], object], count: int) -> float:
    """Microseconds that ``work`` takes on the current stream, the mean of ``count`` calls in a row.
    Waits for them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


class _Mark(NamedTuple):
    name: str
    ticket: int
    sampled: int
    called_ns: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class CudaTimeline:
    """Spans of device work, from two CUDA events around each launch.

    On an idle stream a span begins when the stream takes the first event, so it holds the few
    microseconds in which the host launches the work itself.

    Args:
        stream: where all the work goes. It is waited for, here and in :meth:`spans` only.
        most: launches that are kept, the last ones; None for all.
    """

    def __init__(self, stream: torch.cuda.Stream, most: int | None = None) -> None:
        self._stream = stream
        self._marks: deque[_Mark] = deque(maxlen=most)
        best: int | None = None
        for _ in range(ALIGNMENTS):
            event = torch.cuda.Event(enable_timing=True)
            stream.synchronize()
            before = time.perf_counter_ns()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter_ns()
            if best is None or after - before < best:
                best = after - before
                self._base, self._base_ns = event, (before + after) // 2

    def record(self, work: Callable[[], None], name: str, ticket: int, sampled: int = -1) -> None:
        """Run ``work``, which puts its work on the stream, between two events."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        called = time.perf_counter_ns()
        begin.record(self._stream)
        work()
        end.record(self._stream)
        self._marks.append(_Mark(name, ticket, sampled, called, begin, end))

    def spans(self) -> list[Span]:
        """Everything recorded, in stream order, in nanoseconds of ``time.perf_counter_ns``."""
        self._stream.synchronize()
        return self._spans_of(self._marks)

    def finished(self) -> list[Span]:
        """The :meth:`spans` that are over by now; waits for nothing."""
        marks = [mark for mark in self._marks.copy() if mark.end.query()]
        spans = self._spans_of(marks)
        if marks:  # a float of milliseconds is exact enough for some seconds only
            self._base, self._base_ns = marks[0].begin, spans[0].start_ns
        return spans

    def _spans_of(self, marks: Collection[_Mark]) -> list[Span]:
        spans = [
            Span(m.name, m.ticket, self._host_ns(m.begin), self._host_ns(m.end), m.sampled)
            for m in marks
        ]
        # Nothing runs before it was launched: what looks so is the error of the alignment.
        pairs = zip(spans, marks, strict=True)
        late = max([0, *(mark.called_ns - span.start_ns for span, mark in pairs)])
        return [s._replace(start_ns=s.start_ns + late, end_ns=s.end_ns + late) for s in spans]

    def _host_ns(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._base.elapsed_time(event)
        return self._base_ns + round(milliseconds * 1e6)
