"""How ``bench`` reads a profiler's timeline of the GPU."""

from __future__ import annotations

import pytest

from megatron_async.benchmark.measuring.profiler import (
    STEP_MARKERS,
    Kernel,
    analyse,
    kernels_of,
    percentile,
)


def asynchronous_steps(count: int, gap: float) -> list[Kernel]:
    """Steps of one launch each: sample 10, publish 5, read_packet 5, two layers of 40 that pause
    for 1 before each; ``gap`` between launches. 102 a step, and the gap."""
    kernels = []
    now = 1000.0
    for launch in range(count):
        now += gap
        for name, pause, duration in (
            ("sample", 0, 10),
            ("_publish_kernel", 0, 5),
            ("_read_packet_kernel", 0, 5),
            ("gemm", 1, 40),
            ("gemm", 1, 40),
        ):
            kernels.append(Kernel(name, now + pause, now + pause + duration, launch))
            now += pause + duration
    return kernels


def test_gap_and_shares_of_asynchronous_steps() -> None:
    timeline = analyse(asynchronous_steps(6, gap=8.0))
    assert timeline is not None
    assert timeline.steps == 5
    assert timeline.step_us == pytest.approx(110)
    assert timeline.gap_us == pytest.approx(8) and timeline.gap_us_p99 == pytest.approx(8)
    assert timeline.graph_share == pytest.approx(102 / 110)
    assert timeline.kernel_share == pytest.approx(100 / 110)
    assert (timeline.kernels_per_step, timeline.launches_per_step) == (5, 1)


def test_serial_steps_add_the_gaps_of_both_launches() -> None:
    kernels = []
    for step in range(4):
        at = 100.0 * step
        kernels += [
            Kernel("_read_packet_kernel", at, at + 5, 2 * step),
            Kernel("gemm", at + 5, at + 60, 2 * step),
            Kernel("_publish_kernel", at + 63, at + 70, 2 * step + 1),
        ]
    timeline = analyse(kernels, skip=1)
    assert timeline is not None
    assert (timeline.steps, timeline.launches_per_step) == (2, 2)
    assert timeline.gap_us == pytest.approx(3 + 30)
    assert timeline.graph_share == pytest.approx(0.67)
    assert timeline.kernel_share == pytest.approx(0.67)


def test_kernels_that_overlap_are_counted_once() -> None:
    kernels = []
    for step in range(3):
        at = 50.0 * step
        kernels += [
            Kernel("read_packet", at, at + 20, step),
            Kernel("long", at + 10, at + 45, step),
            Kernel("short", at + 15, at + 20, step),
        ]
    timeline = analyse(kernels)
    assert timeline is not None
    assert timeline.kernel_share == pytest.approx(0.9)
    assert timeline.gap_us == pytest.approx(5)


def test_timeline_without_steps_or_launches_is_refused() -> None:
    assert analyse([]) is None
    assert analyse([Kernel("gemm", 0, 1, 0), Kernel("gemm", 2, 3, 1)]) is None
    assert analyse(asynchronous_steps(1, gap=1.0)) is None
    unknown = [kernel._replace(launch=-1) for kernel in asynchronous_steps(4, gap=1.0)]
    assert analyse(unknown) is None


def test_trace_gives_the_work_of_the_device_alone() -> None:
    common = {"ph": "X", "ts": 10.5, "dur": 2.0, "args": {"correlation": 7}}
    events = [
        {"ph": "M", "name": "process_name"},
        {**common, "cat": "cuda_runtime", "name": "cudaGraphLaunch"},
        {**common, "cat": "kernel", "name": "gemm"},
        {**common, "cat": "gpu_memcpy", "name": "Memcpy DtoH"},
    ]
    assert kernels_of(events) == [
        Kernel("gemm", 10.5, 12.5, 7),
        Kernel("Memcpy DtoH", 10.5, 12.5, 7),
    ]


def test_percentile_of_few_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([5.0], 0.5) == 5.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0


def test_kernels_that_mark_steps_exist() -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    from megatron_async.kernels import rings
    from megatron_async.kernels.sampling import step_state, window_state

    decode = [step_state._finish_and_publish_kernel, step_state._read_packet_and_begin_kernel]
    drafted = [
        window_state._finish_and_publish_windows_kernel,
        window_state._read_packet_and_begin_windows_kernel,
    ]
    mixed = [rings._publish_kernel, rings._read_packet_kernel]
    for kernels in (decode, drafted, mixed):
        names = [kernel.__name__ for kernel in kernels]
        for marker in STEP_MARKERS:
            assert sum(marker in name for name in names) == 1, (marker, names)
