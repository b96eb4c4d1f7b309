"""What ranks did, on the clock of rank 0."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.device.kernel_profiler import DeviceKernel
from megatron_async.device.protocol import Span
from megatron_async.ranks import messages, timelines
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import ANSWERS, MESSAGES, Now, Timeline
from megatron_async.ranks.rendezvous import unix_group
from megatron_async.ranks.timelines import Recorder, start_timelines, take_timelines

AHEAD = {1: 5_000_000_000, 2: -3_000_000_000}
SPANS = [Span("H2D F", 3, 100, 200), Span("S H2D F", 4, 210, 300, 3)]


class OtherHosts:
    """A group of two other ranks, whose clocks are ahead and behind; they answer at once, but for
    one answer that is late."""

    def __init__(self, *, is_on_one_host: bool) -> None:
        self.is_on_one_host = is_on_one_host
        self.layout = Layout(pipeline=3)
        self.told: list[messages.Message] = []

    def tell(self, message: messages.Message) -> None:
        self.told.append(MESSAGES.decode(MESSAGES.encode(message)))

    def await_answers(self) -> dict[int, tuple[Any, int]]:
        found = {}
        for rank, ahead in AHEAD.items():
            answer: Any = messages.Done()
            if isinstance(self.told[-1], messages.AskClock):
                answer = Now(time.perf_counter_ns() + ahead)
            elif isinstance(self.told[-1], messages.TakeTimeline):
                moved = [s._replace(start_ns=s.start_ns + ahead, end_ns=s.end_ns + ahead)
                         for s in SPANS]  # fmt: skip
                kernel = DeviceKernel("k", 100 + ahead, 200 + ahead)
                answer = Timeline(moved, moved[:1], moved[1:], [kernel])
            late = 10**9 if len(self.told) == 3 else 0
            found[rank] = ANSWERS.decode(ANSWERS.encode(answer)), time.perf_counter_ns() + late
        return found


def test_timelines_of_other_hosts_are_moved_to_the_clock_of_rank_0() -> None:
    group: Any = OtherHosts(is_on_one_host=False)
    start_timelines(group, 4, kernels=True)
    found = take_timelines(group, 4)
    assert [(each.rank, each.stage) for each in found] == [(1, 1), (2, 2)]
    for each in found:
        parts = (SPANS, each.host), (SPANS[:1], each.device), (SPANS[1:], each.collectives)
        for expected, moved in parts:
            assert [span._replace(start_ns=0, end_ns=0) for span in moved] == [
                span._replace(start_ns=0, end_ns=0) for span in expected
            ]
            for span, at in zip(moved, expected, strict=True):
                # To half of the time that an answer took, of the fastest one.
                assert abs(span.start_ns - at.start_ns) < 400_000_000
        (kernel,) = each.kernels
        assert kernel.end_ns - kernel.start_ns == 100 and kernel.start_ns == each.device[0].start_ns
    assert group.told[0] == messages.StartTimeline(4, True)
    assert group.told[-1] == messages.TakeTimeline(4)
    assert group.told.count(messages.AskClock()) == timelines.CLOCK_QUESTIONS


def test_ranks_of_one_host_have_one_clock() -> None:
    group: Any = OtherHosts(is_on_one_host=True)
    (first, _) = take_timelines(group, 1)
    assert messages.AskClock() not in group.told
    assert first.device[0].start_ns == SPANS[0].start_ns + AHEAD[1]


def test_a_rank_records_its_host_its_device_and_the_collectives() -> None:
    observed: list[Any] = []
    runner: Any = SimpleNamespace(observe=observed.append)
    device = CpuDevice()
    alone = unix_group.UnixGroup({}, 0, 1)
    options = SimpleNamespace(reduceOp=torch.distributed.ReduceOp.SUM)
    try:
        recorder = Recorder(device, runner)
        device.mark_ticket(7)
        device.sampled = 6
        with recorder.seen("launch", 7):
            observed[0]("pack", 7, 1, 2)
            device.enqueue(lambda: alone.allreduce([torch.ones(2)], options) and None, "S H2D F")
        found = recorder.take()
        assert observed[1:] == [None]
        alone.allreduce([torch.ones(2)], options)
    finally:
        unix_group.observe(None)
        device.close()
    assert [(span.name, span.ticket) for span in found.host] == [("pack", 7), ("launch", 7)]
    (work,), (collective,) = found.device, found.collectives
    assert (work.name, work.ticket, work.sampled) == ("S H2D F", 7, 6)
    assert collective.name == "all-reduce"
    assert work.start_ns <= collective.start_ns <= collective.end_ns <= work.end_ns
    assert found.host[1].start_ns <= work.start_ns


def test_a_rank_records_the_kernels_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [DeviceKernel("k", 1, 2)]
    profiler = SimpleNamespace(take=lambda: kernels)
    monkeypatch.setattr(timelines, "KernelProfiler", lambda: profiler)
    runner: Any = SimpleNamespace(observe=lambda on_span: None)
    device = CpuDevice()
    try:
        assert Recorder(device, runner, kernels=True).take().kernels == kernels
        assert Recorder(device, runner).take().kernels == []
    finally:
        unix_group.observe(None)
        device.close()


def test_a_rank_that_records_nothing_says_so() -> None:
    from megatron_async.errors import IntegrityError
    from megatron_async.ranks.follower import Follower

    follower: Any = Follower(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="nothing is recorded"):
        follower._prepare(messages.TakeTimeline(1))
