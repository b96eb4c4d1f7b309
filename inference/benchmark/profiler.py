"""What ``torch.profiler`` says of steady steps on a GPU: where it waits, where it works."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_async.device.kernel_profiler import Event, device_work, events_of

STEP_MARKERS = ("read_packet", "publish")
"""Parts of the names of kernels that run once a step; the first that is found marks the steps."""

WINDOWS_SKIPPED = 5
"""Steps after the profiler started that are left out: it starts on an empty queue."""


class Kernel(NamedTuple):
    """Device work in the timeline, in microseconds. The kernels of one graph replay, which is one
    call of the host, share ``launch``."""

    name: str
    start: float
    end: float
    launch: int


class Timeline(NamedTuple):
    """Figures of steady steps.

    ``gap_us`` is how long the device stood idle between two launches, summed over the launches of
    a step: one at depth 1 and more, two at depth 0. ``graph_share`` is the share of the time that
    is not gap: inside some launch. ``kernel_share`` is the share during which some kernel ran:
    the union of their intervals, so the pauses between the kernels of a graph count as idle.
    """

    steps: int
    step_us: float
    gap_us: float
    gap_us_p99: float
    graph_share: float
    kernel_share: float
    kernels_per_step: float
    launches_per_step: float


def analyse(kernels: Sequence[Kernel], *, skip: int = 0) -> Timeline | None:
    """The figures of the whole steps in a timeline; None when no marker shows two steps, or when
    launches cannot be told apart.

    A step is what begins between one marker kernel and the next; the first ``skip`` are left out.
    """
    ordered = sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))
    marked = ([n for n, k in enumerate(ordered) if marker in k.name] for marker in STEP_MARKERS)
    starts = next(filter(None, marked), [])[skip:]
    if len(starts) < 2:
        return None
    window = ordered[starts[0] : starts[-1] + 1]
    steps = list(itertools.pairwise(start - starts[0] for start in starts))
    # idle[n] lies between window[n] and window[n + 1]; a gap is one between two launches.
    busy_until = itertools.accumulate((kernel.end for kernel in window[:-1]), max)
    pairs = zip(window[1:], busy_until, strict=True)
    idle = [max(kernel.start - until, 0.0) for kernel, until in pairs]
    changes = [before.launch != after.launch for before, after in itertools.pairwise(window)]
    if not any(changes):
        return None
    gaps = [sum(itertools.compress(idle[a:b], changes[a:b])) for a, b in steps]
    total = window[-1].start - window[0].start
    return Timeline(
        steps=len(steps),
        step_us=total / len(steps),
        gap_us=statistics.median(gaps),
        gap_us_p99=percentile(gaps, 0.99),
        graph_share=1 - sum(gaps) / total,
        kernel_share=1 - sum(idle) / total,
        kernels_per_step=(len(window) - 1) / len(steps),
        launches_per_step=sum(changes) / len(steps),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def kernels_of(events: Iterable[Event]) -> list[Kernel]:
    """The device's work among a profiler's events."""
    kernels = []
    for event in device_work(events):
        start, launch = float(event["ts"]), int(event.get("args", {}).get("correlation", -1))
        kernels.append(Kernel(event["name"], start, start + float(event["dur"]), launch))
    return kernels


def profile(work: Callable[[], None]) -> list[Kernel]:
    """Run ``work``, which ends with the device idle, under the profiler; needs CUDA."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
    return kernels_of(events_of(profiler))


def profile_next(engine: Any, count: int) -> dict[str, float] | None:
    """The timeline of the engine's next ``count`` steps, and device allocations a step; None where
    no step could be told from the next."""
    device = engine.device.torch_device
    allocations = 0

    def steps() -> None:
        nonlocal allocations
        before = _allocations(device)
        for _ in range(count):
            engine.step_modern()
        allocations = _allocations(device) - before
        engine.device.synchronize()

    timeline = analyse(profile(steps), skip=WINDOWS_SKIPPED)
    if timeline is None:
        return None
    return {**timeline._asdict(), "device_allocations_per_step": allocations / count}


def _allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
