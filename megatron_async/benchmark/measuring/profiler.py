"""What ``torch.profiler`` says of steady steps on a GPU: where it waits, where it works."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_async.benchmark.measuring.loads import Request
from megatron_async.device.kernel_profiler import Event, device_work, events_of
from megatron_async.engine.stepping.drive import drive

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
    begins = np.array([kernel.start for kernel in window])
    ends = np.array([kernel.end for kernel in window])
    # idle[n] lies between window[n] and window[n + 1]; a gap is one between two launches.
    idle = np.maximum(begins[1:] - np.maximum.accumulate(ends[:-1]), 0.0)
    changes = np.diff([kernel.launch for kernel in window]) != 0
    if not changes.any():
        return None
    gaps = np.add.reduceat(idle * changes, np.subtract(starts[:-1], starts[0])).tolist()
    total, steps = window[-1].start - window[0].start, len(gaps)
    return Timeline(
        steps=steps,
        step_us=total / steps,
        gap_us=statistics.median(gaps),
        gap_us_p99=percentile(gaps, 0.99),
        graph_share=1 - sum(gaps) / total,
        kernel_share=1 - float(idle.sum()) / total,
        kernels_per_step=len(idle) / steps,
        launches_per_step=int(changes.sum()) / steps,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def kernels_of(events: Iterable[Event]) -> list[Kernel]:
    """The device's work among a profiler's events."""
    kernels = []
    for event in device_work(events):
        start, launch = float(event["ts"]), int(event.get("args", {}).get("correlation", -1))
        kernels.append(Kernel(event["name"], start, start + float(event["dur"]), launch))
    return kernels


def profile_run(
    engine: Any, requests: Sequence[Request], *, after_tokens: int, steps: int
) -> dict[str, float] | None:
    """The device's timeline of ``steps`` steps after ``after_tokens`` committed tokens, all
    requests there at once, and the device allocations made in a step; None where no step could be
    told from the next. Times in it hold the profiler's own cost: compare gaps and shares, not
    milliseconds. Needs CUDA."""
    from torch.profiler import ProfilerActivity, profile

    def allocations() -> int:
        stats = torch.cuda.memory_stats(engine.device.torch_device)
        return int(stats.get("allocation.all.allocated", 0))

    engine.reset()
    for number, request in enumerate(requests):
        engine.add_request(number, request.prompt, request.params)
    for _ in drive(engine):
        if engine.counters.tokens_committed >= after_tokens:
            break
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        before = allocations()
        for _ in range(steps):
            engine.step_modern()
        made = allocations() - before
        engine.device.synchronize()
    engine.reset()
    timeline = analyse(kernels_of(events_of(profiler)), skip=WINDOWS_SKIPPED)
    if timeline is None:
        return None
    return {**timeline._asdict(), "device_allocations_per_step": made / steps}
