"""Launches and the pauses between them, on the device's own clock, without a profiler.

The device's timeline marks when each launch begins and ends: on CUDA with two events, which cost
the host a few microseconds and are read after the run; on a CPU the worker thread, which is the
stream, takes the time.
"""

from __future__ import annotations

import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_async.device.cuda import CudaDevice
from megatron_async.device.cuda_timeline import CudaTimeline
from megatron_async.device.protocol import Device, Span
from megatron_async.perfetto.bubble import Stage, bubble, by_stage
from megatron_async.perfetto.recorder import Ranks
from megatron_async.runner.cuda_graphs import MIXED


class LaunchTimes(NamedTuple):
    """Launches of a run, in milliseconds of the device.

    ``inside_share`` is the share of the time from the first launch's begin to the last one's end
    that lies inside a launch. A launch is one graph replay, or the kernels of a step with prefill
    chunks that no graph holds; what a launch pauses within itself counts as inside.
    """

    launches: int
    total_ms: float
    inside_share: float
    pause_ms_p50: float
    pause_ms_max: float


def launch_times(spans: Sequence[Span], *, after_prefill: bool = False) -> LaunchTimes | None:
    """The figures of launches in stream order; ``after_prefill`` leaves out what comes before the
    end of the last step with prefill chunks. None when fewer than two are left."""
    if after_prefill:
        first = max((n for n, span in enumerate(spans, 1) if span.name == MIXED), default=0)
        spans = spans[first:]
    pairs = itertools.pairwise(spans)
    pauses = [1e-6 * (after.start_ns - before.end_ns) for before, after in pairs]
    if not pauses:
        return None
    inside = 1e-6 * sum(span.end_ns - span.start_ns for span in spans)
    total = inside + sum(pauses)
    middle, longest = statistics.median(pauses), max(pauses)
    return LaunchTimes(len(spans), total, inside / total, middle, longest)


@contextmanager
def marked_launches(
    device: Device, ranks: Ranks | None = None, *, after_prefill: bool = False
) -> Iterator[Callable[[], dict[str, Any] | None]]:
    """Mark all launches in between, also those of other ``ranks``. What it gives returns the
    figures afterwards, with what the marks of a launch cost the host; None where there were too
    few. ``bubble`` is by pipeline stage, see :func:`~megatron_async.perfetto.bubble.bubble`."""
    cost = host_us_per_launch(device)
    spans: list[Span] = []
    seen: list[Any] = []

    def figures() -> dict[str, Any] | None:
        times = launch_times(spans, after_prefill=after_prefill)
        if times is None:
            return None
        found = {**times._asdict(), "host_us_per_launch": cost, "bubble": None}
        if seen:
            prefills = [span.end_ns for span in spans if span.name == MIXED]
            start_ns = max(prefills, default=0) if after_prefill else 0
            found["bubble"] = bubble(by_stage(Stage(spans, seen[0]), seen[1]), start_ns)
        return found

    device.start_timeline()
    if ranks is not None:
        ranks.start()
    try:
        yield figures
    finally:
        spans += device.take_timeline()
    if ranks is not None:
        seen += ranks.take()


def host_us_per_launch(device: Device, launches: int = 500) -> float:
    """What the marks of a launch cost the host, in microseconds; nothing on a CPU."""
    if not isinstance(device, CudaDevice):
        return 0.0
    timeline = CudaTimeline(device.stream)
    seconds = timeit.timeit(lambda: timeline.record(lambda: None, "nothing", -1), number=launches)
    return 1e6 * seconds / launches
