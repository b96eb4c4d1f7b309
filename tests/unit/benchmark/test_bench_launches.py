"""What ``bench`` says of launches and the pauses between them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from megatron_async.benchmark.measuring.launches import (
    host_us_per_launch,
    launch_times,
    marked_launches,
)
from megatron_async.device.cpu import CpuDevice, Span
from megatron_async.runner.cuda_graphs import MIXED


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice()
    yield opened
    opened.close()


def spans(*times: tuple[float, float], name: str = "S H2D F") -> list[Span]:
    """Launches from and to these milliseconds."""
    return [Span(name, n, round(a * 1e6), round(b * 1e6)) for n, (a, b) in enumerate(times)]


def test_share_inside_launches_is_that_of_the_whole_time() -> None:
    times = launch_times(spans((10, 20), (21, 30), (33, 40)))
    assert times is not None
    assert (times.launches, times.total_ms) == (3, 30)
    assert times.inside_share == pytest.approx(26 / 30)
    assert (times.pause_ms_p50, times.pause_ms_max) == (2, 3)


def test_launches_before_the_last_prefill_are_left_out() -> None:
    first = spans((0, 1), (5, 6))
    prefill = spans((7, 8), name=MIXED)
    last = spans((20, 21), (21, 22))
    times = launch_times(first + prefill + last, after_prefill=True)
    assert times is not None
    assert (times.launches, times.inside_share) == (2, 1)
    with_all = launch_times(first + prefill + last)
    assert with_all is not None and with_all.launches == 5


def test_one_launch_has_no_pause() -> None:
    assert launch_times(spans((0, 1))) is None
    assert launch_times(spans((0, 1)) + spans((1, 2), name=MIXED), after_prefill=True) is None


def test_only_launches_in_between_are_marked(device: CpuDevice) -> None:
    graph = device.capture(lambda: time.sleep(0.01), "work")
    graph.replay()
    device.synchronize()
    with marked_launches(device) as figures:
        for _ in range(3):
            graph.replay()
            device.synchronize()
            time.sleep(0.01)
    graph.replay()
    found = figures()
    # Three launches of at least 10 ms with two pauses of at least 10 ms between them.
    assert found is not None and found["launches"] == 3
    assert found["pause_ms_max"] >= found["pause_ms_p50"] >= 10
    assert found["inside_share"] * found["total_ms"] >= 30
    assert found["host_us_per_launch"] == host_us_per_launch(device) == 0
    assert device.timeline is None


def test_marks_end_with_what_failed_in_between(device: CpuDevice) -> None:
    with pytest.raises(KeyError), marked_launches(device):
        raise KeyError
    assert device.timeline is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_time_launches_on_a_gpu() -> None:
    from megatron_async.device.cuda import CudaDevice

    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(4096, 4096, device="cuda")

    def work() -> None:
        torch.mm(x, x)

    graph = device.capture(work, "work")
    assert 0 < host_us_per_launch(device) < 100
    with marked_launches(device) as figures:
        for _ in range(20):
            graph.replay()
    found = figures()
    assert found is not None and found["launches"] == 20
    assert found["inside_share"] > 0.9 and found["total_ms"] > 1
    device.close()
