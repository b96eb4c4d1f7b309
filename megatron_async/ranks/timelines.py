"""What the ranks of a model do when, on the clock of rank 0.

On one host all processes have one clock. Over hosts rank 0 asks each rank for its time: of some
answers the fastest one tells by how much a clock is ahead, to half of the time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_async.device.kernel_profiler import DeviceKernel, KernelProfiler
from megatron_async.device.protocol import Device, Span
from megatron_async.ranks.messages import AskClock, Now, StartTimeline, TakeTimeline, Timeline
from megatron_async.ranks.rendezvous import unix_group
from megatron_async.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from megatron_async.ranks.group import RankGroup

CLOCK_QUESTIONS = 32
NO_TICKET = -1


class RankTimeline(NamedTuple):
    """A rank's :class:`~megatron_async.ranks.messages.Timeline`, by rank 0's clock."""

    rank: int
    stage: int
    host: list[Span]
    device: list[Span]
    collectives: list[Span]
    kernels: Sequence[DeviceKernel] = ()


class Collectives:
    """The collectives of this process from now on, in the order of their ends: those that
    ``unix_group`` runs. What NCCL runs in a captured graph nobody sees from outside."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        unix_group.observe(self._add)

    def _add(self, name: str, start_ns: int, end_ns: int) -> None:
        self.spans.append(Span(name, NO_TICKET, start_ns, end_ns))

    def take(self) -> list[Span]:
        """Stop, and return them."""
        unix_group.observe(None)
        return self.spans


class Recorder:
    """Records what a rank other than 0 does from now on, and its GPU's ``kernels``."""

    def __init__(self, device: Device, runner: ModelRunner, *, kernels: bool = False) -> None:
        self._device, self._runner = device, runner
        self._host: list[Span] = []
        self._profiler = KernelProfiler() if kernels else None
        device.start_timeline()
        self._collectives = Collectives()
        runner.observe(self._add)

    def _add(self, name: str, ticket: int, start_ns: int, end_ns: int) -> None:
        self._host.append(Span(name, ticket, start_ns, end_ns))

    @contextmanager
    def seen(self, name: str, ticket: int = NO_TICKET) -> Iterator[None]:
        """Note how long the host's work inside takes."""
        start_ns = time.perf_counter_ns()
        yield
        self._add(name, ticket, start_ns, time.perf_counter_ns())

    def take(self) -> Timeline:
        """Wait for the device, and end."""
        device = self._device.take_timeline()
        self._runner.observe(None)
        kernels = [] if self._profiler is None else self._profiler.take()
        return Timeline(self._host, device, self._collectives.take(), kernels)


def start_timelines(group: RankGroup, engine: int, *, kernels: bool = False) -> None:
    """Have the other ranks record what they do for engine ``engine``, and their GPUs'
    ``kernels``."""
    group.tell(StartTimeline(engine, kernels))
    group.await_answers()


def take_timelines(group: RankGroup, engine: int) -> list[RankTimeline]:
    """What the ranks other than 0 have recorded. Rank 0's device has nothing to do any more."""
    offsets = {} if group.is_on_one_host else clock_offsets(group)
    group.tell(TakeTimeline(engine))
    found = []
    for rank, (said, _) in sorted(group.await_answers().items()):
        assert isinstance(said, Timeline)
        ahead = offsets.get(rank, 0)
        stage = group.layout.stage(rank)
        host, device = _moved(said.host, -ahead), _moved(said.device, -ahead)
        collectives, kernels = _moved(said.collectives, -ahead), _moved(said.kernels, -ahead)
        found.append(RankTimeline(rank, stage, host, device, collectives, kernels))
    return found


def clock_offsets(group: RankGroup) -> dict[int, int]:
    """By rank the nanoseconds that its clock is ahead of this process's."""
    best: dict[int, tuple[int, int]] = {}
    for _ in range(CLOCK_QUESTIONS):
        asked = time.perf_counter_ns()
        group.tell(AskClock())
        for rank, (said, answered) in group.await_answers().items():
            assert isinstance(said, Now)
            took = answered - asked
            if rank not in best or took < best[rank][0]:
                best[rank] = took, said.time_ns - (asked + answered) // 2
    return {rank: ahead for rank, (_, ahead) in best.items()}


_Timed = TypeVar("_Timed", Span, DeviceKernel)


def _moved(spans: list[_Timed], by_ns: int) -> list[_Timed]:
    if not by_ns:
        return spans
    return [s._replace(start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns) for s in spans]
