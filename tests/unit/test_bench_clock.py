"""The device of ``bench`` that marks its launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.device.protocol import Device
from megatron_async.inference import bench_clock
from megatron_async.inference.bench_clock import LaunchTimes, TimedDevice
from megatron_async.runner.cuda_graphs import MIXED
from tests.support.patience import PATIENCE_SECONDS


class FakeTime:
    """Stands for ``time``: moves by what work takes and by nothing else."""

    def __init__(self) -> None:
        self.ms = 0

    def perf_counter_ns(self) -> int:
        return self.ms * 1_000_000

    def pass_by(self, ms: int) -> None:
        self.ms += ms


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(bench_clock, "time", fake)
    return fake


@pytest.fixture
def clock() -> Iterator[TimedDevice]:
    timed = TimedDevice(CpuDevice())
    yield timed
    timed.close()


def test_share_inside_launches_is_that_of_the_device(clock: TimedDevice, now: FakeTime) -> None:
    graph = clock.capture(lambda: now.pass_by(10), "work")
    clock.start_marking()
    for pause in (5, 25, 1):
        graph.replay()
        clock.synchronize()
        now.pass_by(pause)
    assert clock.stop_marking() == LaunchTimes(
        launches=3, total_ms=60.0, inside_share=0.5, pause_ms_p50=15.0, pause_ms_max=25.0
    )


def test_queued_launches_leave_no_pause(clock: TimedDevice, now: FakeTime) -> None:
    graph = clock.capture(lambda: now.pass_by(10), "work")
    clock.start_marking()
    for _ in range(3):
        graph.replay()
    times = clock.stop_marking()
    assert times is not None and times.inside_share == 1 and times.total_ms == 30


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
    graph = clock.capture(lambda: gate.wait(PATIENCE_SECONDS) and None, "work")
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
    assert clock.host_us_per_launch() > 0
    for _ in range(2):  # the second time with events that were used before
        clock.start_marking()
        with torch.cuda.stream(clock.stream):  # until all are queued, however slow the host is
            torch.cuda._sleep(500_000_000)
        for _ in range(20):
            graph.replay()
        times = clock.stop_marking()
        assert times is not None and times.launches == 20
        assert times.inside_share > 0.9 and times.total_ms > 1
    clock.close()
