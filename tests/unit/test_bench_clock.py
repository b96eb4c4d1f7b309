"""The device of ``bench`` that marks its launches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.device.protocol import Device
from megatron_async.inference.benchmark.launch_clock import TimedDevice
from megatron_async.runner.cuda_graphs import MIXED


@pytest.fixture
def clock() -> Iterator[TimedDevice]:
    timed = TimedDevice(CpuDevice())
    yield timed
    timed.close()


def test_share_inside_launches_is_that_of_the_device(clock: TimedDevice) -> None:
    graph = clock.capture(lambda: time.sleep(0.01), "work")
    clock.start_marking()
    for _ in range(3):
        graph.replay()
        clock.synchronize()
        time.sleep(0.01)
    times = clock.stop_marking()
    assert times is not None and times.launches == 3
    # Three launches of at least 10 ms with two pauses of at least 10 ms between them.
    assert 10 <= times.pause_ms_p50 <= times.pause_ms_max
    assert times.inside_share * times.total_ms >= 30
    assert (1 - times.inside_share) * times.total_ms >= 20


def test_queued_launches_leave_no_pause(clock: TimedDevice) -> None:
    graph = clock.capture(lambda: time.sleep(0.01), "work")
    clock.start_marking()
    for _ in range(3):
        graph.replay()
    times = clock.stop_marking()
    assert times is not None and times.inside_share > 0.5


@pytest.mark.parametrize("captured", (False, True))
def test_launches_before_the_last_prefill_are_left_out(clock: TimedDevice, captured: bool) -> None:
    graph = clock.capture(lambda: None, "work")
    mixed = clock.capture(lambda: None, MIXED)
    clock.start_marking()
    for _ in range(4):
        graph.replay()
    if captured:
        mixed.replay()
    else:
        clock.enqueue(lambda: None, MIXED)
    graph.replay()
    graph.replay()
    times = clock.stop_marking(after_prefill=True)
    assert times is not None and times.launches == 2


def test_nothing_is_marked_unless_asked(clock: TimedDevice) -> None:
    graph = clock.capture(lambda: None, "work")
    graph.replay()
    assert clock.stop_marking() is None
    clock.start_marking()
    graph.replay()
    assert clock.stop_marking() is None  # one launch has no pause beside it
    assert clock.host_us_per_launch(pairs=10) > 0
    assert not clock.marking and clock.stop_marking() is None


def test_launches_return_before_the_work_is_done(clock: TimedDevice) -> None:
    gate = threading.Event()
    graph = clock.capture(lambda: gate.wait(10) and None, "work")
    clock.start_marking()
    graph.replay()
    graph.replay()
    gate.set()
    assert clock.stop_marking() is not None


def test_it_is_a_device(clock: TimedDevice) -> None:
    device: Device = clock
    assert device.torch_device == torch.device("cpu") and device.captures is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_time_launches_on_a_gpu() -> None:
    from megatron_async.device.cuda import CudaDevice

    clock = TimedDevice(CudaDevice(torch.device("cuda", torch.cuda.current_device())))
    x = torch.ones(4096, 4096, device="cuda")

    def work() -> None:
        torch.mm(x, x)

    graph = clock.capture(work, "work")
    assert 0 < clock.host_us_per_launch() < 100
    for _ in range(2):  # the second time with events that were used before
        clock.start_marking()
        for _ in range(20):
            graph.replay()
        times = clock.stop_marking()
        assert times is not None and times.launches == 20
        assert times.inside_share > 0.9 and times.total_ms > 1
    clock.close()
