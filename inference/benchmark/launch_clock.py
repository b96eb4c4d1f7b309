"""A device that marks when each launch begins and ends, on the device's own clock, without waiting.

On CUDA the marks are events on the engine's stream, read after the run: two for each launch, which
cost the host a few microseconds. On a CPU the worker thread, which is the stream, takes the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_async.device.protocol import Device, Graph, PacketRing, ResultRing
from megatron_async.runner.cuda_graphs import MIXED


class LaunchTimes(NamedTuple):
    """Launches and the pauses between them, in milliseconds of the device.

    ``inside_share`` is the share of the time from the first launch's begin to the last one's end
    that lies inside a launch. A launch is one graph replay, or the kernels of a step with prefill
    chunks that no graph holds; what a launch pauses within itself counts as inside.
    """

    launches: int
    total_ms: float
    inside_share: float
    pause_ms_p50: float
    pause_ms_max: float


class Marks:
    """What :meth:`TimedDevice.marks` has found at its end, plain JSON types; None where that was
    nothing."""

    figures: dict[str, float] | None = None


class TimedDevice:
    """``device`` with a mark before and after all that is launched while :attr:`marking` is on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.torch_device = device.torch_device
        self.captures = device.captures
        self.marking = False
        self._marks: list[Any] = []
        self._spare: list[Any] = []
        self._prefills: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def enqueue(self, work: Callable[[], None], name: str) -> None:
        self.between(lambda: self._device.enqueue(work, name), name)

    def capture(self, work: Callable[[], None], name: str) -> Graph:
        return _TimedGraph(self, self._device.capture(work, name), name)

    def packet_ring(self, entries: int, width: int) -> PacketRing:
        return self._device.packet_ring(entries, width)

    def result_ring(self, entries: int, width: int) -> ResultRing:
        return self._device.result_ring(entries, width)

    def mark_ticket(self, ticket: int) -> None:
        self._device.mark_ticket(ticket)

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._device.close()

    def between(self, launch: Callable[[], None], name: str) -> None:
        """Launch something between two marks."""
        if not self.marking:
            launch()
            return
        self._prefills.append(name == MIXED)
        self._mark()
        launch()
        self._mark()

    @contextmanager
    def marks(self, *, after_prefill: bool = False) -> Iterator[Marks]:
        """Mark all launches in between; the figures say as well what marks cost the host."""
        cost = self.host_us_per_launch()
        found = Marks()
        self.start_marking()
        yield found
        times = self.stop_marking(after_prefill=after_prefill)
        if times is not None:
            found.figures = {**times._asdict(), "host_us_per_launch": cost}

    def start_marking(self) -> None:
        """Forget all marks and mark from now on."""
        if self.captures:
            self._spare += self._marks
        self._marks, self._prefills = [], []
        self.marking = True

    def stop_marking(self, *, after_prefill: bool = False) -> LaunchTimes | None:
        """Wait for the device and read the marks; ``after_prefill`` leaves out what comes before
        the end of the last step with prefill chunks. None when fewer than two launches are left."""
        self.marking = False
        self._device.synchronize()
        first = 0
        if after_prefill and True in self._prefills:
            first = len(self._prefills) - self._prefills[::-1].index(True)
        marks = self._marks[2 * first :]
        if len(marks) < 4:
            return None
        elapsed = self._elapsed_ms
        inside = sum(elapsed(a, b) for a, b in zip(marks[::2], marks[1::2], strict=True))
        pauses = [elapsed(a, b) for a, b in zip(marks[1:-1:2], marks[2::2], strict=True)]
        total = inside + sum(pauses)
        return LaunchTimes(
            launches=len(marks) // 2,
            total_ms=total,
            inside_share=inside / total,
            pause_ms_p50=statistics.median(pauses),
            pause_ms_max=max(pauses),
        )

    def host_us_per_launch(self, pairs: int = 500) -> float:
        """What two marks cost the host, in microseconds."""
        for _ in range(2 * pairs):  # makes the events
            self._mark()
        self.start_marking()
        started = time.perf_counter_ns()
        for _ in range(2 * pairs):
            self._mark()
        cost = (time.perf_counter_ns() - started) * 1e-3 / pairs
        self.synchronize()
        self.start_marking()
        self.marking = False
        return cost

    def _mark(self) -> None:
        if self.captures:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record(self._device.stream)  # type: ignore[attr-defined]
            self._marks.append(event)
        else:
            mark: list[int] = []
            self._marks.append(mark)
            self._device.enqueue(lambda: mark.append(time.perf_counter_ns()), "mark")

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        if self.captures:
            return float(begin.elapsed_time(end))
        return float(end[0] - begin[0]) * 1e-6


class _TimedGraph:
    def __init__(self, device: TimedDevice, graph: Graph, name: str) -> None:
        self._device = device
        self._graph = graph
        self._name = name

    def replay(self) -> None:
        self._device.between(self._graph.replay, self._name)
