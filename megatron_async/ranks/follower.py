"""A rank that does what rank 0 tells it: it plans nothing, and waits for no token."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.device.protocol import Device
from megatron_async.errors import IntegrityError, MegatronAsyncError
from megatron_async.models import parallel
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks import messages, process_group
from megatron_async.ranks.channel import Receiver, RingReceiver
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import ANSWERS, MESSAGES, Answer, Done, Failed, Message
from megatron_async.ranks.rendezvous.call import Line
from megatron_async.ranks.rendezvous.meeting import connect
from megatron_async.ranks.rendezvous.shared import Shared
from megatron_async.ranks.timelines import Recorder
from megatron_async.runner.model_runner import ModelRunner

SPIN_SECONDS = {"cpu": 0.0002, "cuda": 0.02}
"""For how long a follower looks for the next message before it sleeps: longer than a step on a
GPU, where each rank has cores to spare."""
CHECK_SECONDS = 0.2
"""Between two looks whether there is anything to wait for."""


class Model(Protocol):
    """What a follower does with messages that are not about steps."""

    def load(self, message: messages.LoadModel) -> None: ...

    def make(self, message: messages.BuildModel) -> None: ...

    def build(self, message: messages.BuildEngine) -> tuple[Device, ModelRunner]: ...

    def read_weights(self, source: str, allow_non_finite_weights: bool) -> Callable[[], None]: ...

    def read_shards(self, message: messages.ReadShards) -> Callable[[], None]: ...

    def await_tensors(self, message: messages.AwaitTensors) -> Callable[[], None]: ...

    def sleep(self, message: messages.Sleep) -> None: ...

    def wake_up(self, message: messages.WakeUp) -> None: ...


class Group:
    """A follower's end of a group; see ``RankGroup``.

    Args:
        ring: a descriptor of the memory of a ring; None takes messages from the line.
        check: called now and then while there is no message; what it raises ends the wait.
    """

    def __init__(
        self,
        rank: int,
        line: Line,
        ring: int | None,
        followers: int,
        spin_seconds: float,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self._line = line
        self._check = check
        self._ring: Receiver | None = None
        if ring is not None:
            sleep = None if check is None else self._sleep
            self._ring = RingReceiver(ring, rank - 1, followers, line.wakes, spin_seconds, sleep)

    def receive(self) -> Message:
        """The next message; waits for it."""
        ring = self._ring
        return MESSAGES.decode(self._from_line() if ring is None else ring.receive())

    def _sleep(self) -> None:
        assert self._check is not None
        self._line.wakes.wait(CHECK_SECONDS)
        self._check()

    def _from_line(self) -> bytes:
        if self._check is None:
            return self._line.messages.get()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._line.messages.get(timeout=CHECK_SECONDS)
            self._check()

    def answer(self, answer: Answer) -> None:
        """Say that the last message is done, or why it cannot be."""
        self._line.say(ANSWERS.encode(answer))

    def fail(self, error: BaseException) -> None:
        """Say why this rank ends."""
        self._line.say(ANSWERS.encode(Failed(f"failed: {type(error).__name__}: {error}")))


def join_group(layout: Layout, device: torch.device, store: dist.Store, rank: int) -> Group:
    """Be a rank other than 0 of a group that is led over the same store."""
    call, shared = connect(dist.PrefixStore("ranks", store), rank)
    return meet_rank_0(layout, device, rank, Line(call), shared, dist.PrefixStore("torch", store))


def meet_rank_0(
    layout: Layout,
    device: torch.device,
    rank: int,
    line: Line,
    shared: Shared | None,
    store: dist.Store | None = None,
) -> Group:
    """Join the group of a rank 0 that this process is connected with.

    Args:
        store: where ranks over hosts meet in torch.distributed; those of one host share one.
    """
    spin = SPIN_SECONDS[device.type]
    ring = None if shared is None else shared.ring
    group = Group(rank, line, ring, layout.world_size - 1, spin)
    if shared is not None:
        store = dist.FileStore(shared.store, layout.world_size)
    try:
        process_group.join(layout, device, store, rank, shared is not None)
        parallel.set_current(ModelParallel(layout, rank, device))
    except BaseException as error:
        group.fail(error)
        process_group.abandon()
        raise
    return group


class Follower:
    """Does what comes until the end.

    Args:
        model: loads, builds and replaces.
    """

    def __init__(self, group: Group, model: Model) -> None:
        self._group = group
        self._model = model
        self._engines: dict[int, tuple[Device, ModelRunner]] = {}
        self._replace: Callable[[], None] | None = None
        self._recorder: Recorder | None = None

    def run(self) -> None:
        """Follow until rank 0 ends the group."""
        while not isinstance(message := self._receive(), messages.Stop):
            self.do(message)

    def do(self, message: Message) -> None:
        """Do what a message says, and answer it where rank 0 waits for that."""
        if not message.is_answered:
            self._step(message)
            return
        try:
            answer = self._prepare(message) or Done()
        except MegatronAsyncError as refused:
            answer = Done(type(refused).__name__, str(refused))
        self._group.answer(answer)

    def _receive(self) -> Message:
        if self._recorder is None:
            return self._group.receive()
        with self._recorder.seen("receive"):
            return self._group.receive()

    def _prepare(self, message: Message) -> Answer | None:
        """What rank 0 waits for; returns what it answers if not that it is done."""
        match message:
            case messages.StartTimeline(engine=number, kernels=kernels):
                self._recorder = Recorder(*self._engines[number], kernels=kernels)
            case messages.TakeTimeline():
                recorder, self._recorder = self._recorder, None
                if recorder is None:
                    raise IntegrityError("nothing is recorded on this rank")
                return recorder.take()
            case messages.AskClock():
                return messages.Now(time.perf_counter_ns())
            case messages.LoadModel():
                self._model.load(message)
            case messages.BuildModel():
                self._model.make(message)
            case messages.BuildEngine(engine=number):
                self._engines[number] = self._model.build(message)
            case messages.ReadWeights(source=source, allow_non_finite_weights=allow):
                self._replace = self._model.read_weights(source, allow)
            case messages.ReadShards():
                self._replace = self._model.read_shards(message)
            case messages.AwaitTensors():
                self._replace = self._model.await_tensors(message)
            case messages.ReplaceWeights():
                self._synchronize()
                if self._replace is not None:
                    self._replace()
                self._replace = None
                self._audit("new weights")
            case messages.Sleep():
                self._synchronize()
                self._model.sleep(message)
                self._audit("a sleep")
            case messages.WakeUp():
                self._model.wake_up(message)
                self._audit("a wake-up")
        return None

    def _audit(self, event: str) -> None:
        """Raises IntegrityError if the graphs of an engine do not fit it any more."""
        self._synchronize()
        for _, runner in self._engines.values():
            if runner.audit is not None:
                runner.audit.check(event)

    def fail(self, error: BaseException) -> None:
        """End waits for the devices of engines that rank 0 has not released."""
        for device, _ in self._engines.values():
            device.fail(error)

    def _synchronize(self) -> None:
        for device, _ in self._engines.values():
            device.synchronize()

    def _step(self, message: Message) -> None:
        """A call of rank 0's loop on its runner."""
        device, runner = self._engines.get(message.engine, (None, None))  # type: ignore[union-attr]
        if device is None or runner is None:
            if isinstance(message, messages.Release):
                return  # it could not be built here
            raise IntegrityError(f"{type(message).__name__} is about an engine that is not there")
        match message:
            case messages.Launch(plan=plan):
                if self._recorder is None:
                    runner.launch(plan)
                else:
                    with self._recorder.seen("launch", plan.number):
                        runner.launch(plan)
                runner.skip_results()
            case messages.Sample(number=number):
                runner.sample_until(number)
                runner.skip_results()
            case messages.Masks(data=data):
                _take_masks(runner, data)
            case messages.Guesses(guesses=guesses):
                if runner.pending is not None:
                    runner.guess(runner.pending, guesses)
            case messages.PoisonFreed(blocks=blocks, slots=slots):
                runner.poison_freed(blocks, slots)
            case messages.Restart():
                runner.restart()
            case messages.ChooseScales(stored=stored):
                runner.choose_scales(stored=stored)
            case messages.Release(engine=number):
                runner.settle()
                device.close()
                runner.release()
                del self._engines[number]


def _take_masks(runner: ModelRunner, data: bytes) -> None:
    pending = runner.pending
    if pending is None:
        raise IntegrityError("masks of no ticket")
    masks, masked = runner.claim_masks(pending)
    words = np.frombuffer(data, dtype=np.int32)
    masked[:] = words[: len(masked)]
    masks[masked != 0] = words[len(masked) :].reshape(-1, masks.shape[1])
