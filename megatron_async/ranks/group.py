"""The ranks of one model, as rank 0 has them: what they are told, and their death."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_async.errors import ConfigError, MegatronAsyncError, RankDiedError
from megatron_async.models import parallel
from megatron_async.models.parallel import ModelParallel
from megatron_async.processes.call import Call
from megatron_async.processes.child import EXIT_SECONDS, Child, end_processes, how_ended, wait_for
from megatron_async.processes.watching.heartbeat import Heartbeats
from megatron_async.ranks import new_weights, process_group
from megatron_async.ranks.channel import Sender
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import ANSWERS, MESSAGES, Answer, Done, Failed, Message, Stop
from megatron_async.ranks.rendezvous.call import BEAT, OVER
from megatron_async.ranks.rendezvous.shared import remove_folder

T = TypeVar("T")
EXPLAIN_SECONDS = 3.0
"""For the connection to a rank to say that it has died, when a collective has."""
LOOK_SECONDS = 1.0
"""Between two looks whether somebody still has the group."""

_unfinished: list[threading.Thread] = []
"""Threads of this process that met ranks which died meanwhile."""


class RankGroup:
    """Rank 0's hold on the others. One for each process at a time, unless they are the user's.

    Args:
        calls: connections by rank.
        processes: those that this process has started, by rank.
        timeout_seconds: of silence after which a rank is taken for dead; 0 is never.
        folder: that ranks of one host share, which is removed with the group; None over hosts.
        place: rank 0's own, in groups of the user's, which outlive this one; None: :meth:`join`.

    Attributes:
        parallel: rank 0's own place, once :meth:`join` is over.
        model_path: the directory of the model; None of random weights.
        failure: why the group has ended; None while it lives.
        is_on_one_host: all ranks are.
    """

    parallel: ModelParallel

    def __init__(
        self,
        layout: Layout,
        sender: Sender,
        calls: dict[int, Call],
        processes: Mapping[int, Child],
        timeout_seconds: float,
        folder: str | None = None,
        place: ModelParallel | None = None,
    ) -> None:
        self.layout = layout
        self.failure: RankDiedError | None = None
        self.model_path: str | None = None
        self._sender = sender
        self._calls = calls
        self._processes = processes
        self._sending = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[tuple[int, Answer, int]]] = {}
        self._own = threading.local()  # the number of a thread's last message that is answered
        self._joined, self._stops, self._closed = place is not None, False, False
        if place is not None:
            self.parallel = place
        self._engines = 0
        self._steps_of: int | None = None
        self._asked = 0
        self._answered = dict.fromkeys(calls, 0)
        self._timeout_seconds = timeout_seconds
        self._heartbeats = Heartbeats(calls, timeout_seconds)
        self._on_death: dict[int, weakref.WeakMethod[Callable[[RankDiedError], None]]] = {}
        self._over = threading.Event()
        # Finalizers run in the reverse order: the others are gone by then.
        self._abandon = weakref.finalize(self, _abandon_on_gpus)
        self._owns_gpus = place is None and _has_gpus()
        if place is not None:
            self._abandon.detach()
        self._end = weakref.finalize(
            self, _end_all, list(processes.values()), list(calls.values()), sender, place is None
        )
        self.is_on_one_host = folder is not None
        self._tidy_up = weakref.finalize(self, remove_folder, folder)
        # The thread keeps the group no longer than somebody else does.
        self._watching = threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="ranks", daemon=True
        )
        self._watching.start()

    def join(self, device: torch.device, store: dist.Store) -> None:
        """Meet the others in torch.distributed and in megatron-core's parallel state. In a thread,
        since nothing else ends its wait for a rank that has died.

        Raises:
            RankDiedError: one has.
        """

        def join() -> ModelParallel:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            process_group.join(self.layout, device, store, 0, self.is_on_one_host)
            return ModelParallel(self.layout, 0, device)

        self.parallel = self._while_alive(join)
        self._joined = True
        parallel.set_current(self.parallel)

    def _while_alive(self, work: Callable[[], T]) -> T:
        ends: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                ends.put((work(),))
            except BaseException as error:
                ends.put(error)

        joining = threading.Thread(target=run, name="joining ranks", daemon=True)
        joining.start()
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    found = ends.get(timeout=0.1)
                    break
                self.check()
        except BaseException:
            _unfinished.append(joining)  # torch numbers groups: the next one would not be found
            raise
        if isinstance(found, tuple):
            return found[0]
        raise self.explain(found) if isinstance(found, RuntimeError) else found

    @property
    def pids(self) -> dict[int, int]:
        """The ids of the processes that this one has started, by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    # --- what the ranks are told --------------------------------------------------------------

    def next_engine(self) -> int:
        """A number for one more engine over the model."""
        self._engines += 1
        return self._engines

    def tell(self, message: Message) -> None:
        """Send to all; waits for nobody.

        Raises:
            RankDiedError: the group has ended.
        """
        data = MESSAGES.encode(message)
        with self._sending:
            self.check()
            if message.is_answered:
                self._asked = self._own.asked = self._asked + 1
                self._answers[self._asked] = queue.SimpleQueue()
            self._sender.send(data)

    def begin_steps(self, engine: int) -> None:
        """Engine ``engine`` has steps in flight from now on. Those of two would meet in the
        collectives of different ranks in different orders.

        Raises:
            ConfigError: another one has.
        """
        with self._sending:
            if self._steps_of not in (None, engine):
                raise ConfigError(
                    "another engine over these ranks has steps in flight, and two may not be "
                    "stepped at the same time: finish the requests of one first, or close it"
                )
            self._steps_of = engine

    def end_steps(self, engine: int) -> None:
        """Engine ``engine`` has none."""
        with self._sending:
            if self._steps_of == engine:
                self._steps_of = None

    def await_answers(self) -> dict[int, tuple[Answer, int]]:
        """Wait until all ranks have done the last message of this thread that is answered.

        Returns:
            By rank what it has answered, and when that came, by ``time.perf_counter_ns``.

        Raises:
            MegatronAsyncError: one could not, of the type that it met.
            RankDiedError: the group has ended.
        """
        failed: MegatronAsyncError | None = None
        found: dict[int, tuple[Answer, int]] = {}
        for _ in self._calls:
            rank, said, time_ns = self._answer(self._answers[self._own.asked])
            found[rank] = said, time_ns
            if isinstance(said, Done):
                failed = said.as_error(rank) or failed
        del self._answers[self._own.asked]
        if failed is not None:
            raise failed
        return found

    def read_weights(
        self, model: object, source: object, read: Callable[[], Callable[[], None]], **checks: bool
    ) -> Callable[[], None]:
        """See :func:`megatron_async.ranks.new_weights.read_weights`."""
        return new_weights.read_weights(self, model, source, read, **checks)

    def _answer(self, answers: queue.SimpleQueue[T]) -> T:
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=0.1)
            self.check()

    # --- life and death -----------------------------------------------------------------------

    def check(self) -> None:
        """Raises :class:`RankDiedError` if the group has ended."""
        if self.failure is not None:
            raise RankDiedError(*self.failure.args)
        if self._closed:
            raise RankDiedError("the ranks of the model have been closed")

    @property
    def is_alive(self) -> bool:
        """All ranks do what they are told."""
        return self.failure is None and not self._closed

    def explain(self, error: RuntimeError) -> RuntimeError:
        """What a device's error comes from: the death of a rank, if one has died."""
        if isinstance(error, MegatronAsyncError) or self._closed:
            return error
        if self.failure is None:
            self._over.wait(EXPLAIN_SECONDS)
        return error if self.failure is None else RankDiedError(*self.failure.args)

    def when_it_dies(self, number: int, call: Callable[[RankDiedError], None]) -> None:
        """Have ``call``, a method of engine ``number``, called in a thread of the group's, unless
        the engine has gone by then."""
        self._on_death[number] = weakref.WeakMethod(call)
        if self.failure is not None:
            call(self.failure)

    def forget(self, number: int) -> None:
        """Engine ``number`` is closed."""
        self._on_death.pop(number, None)

    def watch(self) -> bool:
        """Take what the others say, and ask whether they run; returns whether to go on."""
        ranks = {call: rank for rank, call in self._calls.items()}
        until = self._heartbeats.wait_seconds(time.monotonic())
        ready = wait(list(ranks), timeout=min(until, LOOK_SECONDS))
        for call in ready:
            rank = ranks[call]  # type: ignore[index]
            try:
                data = call.recv_bytes()  # type: ignore[union-attr]
                said = None if data == BEAT else ANSWERS.decode(data)
            except (EOFError, OSError, ValueError):
                if not self._stops:  # else it has done what it was told
                    self._died(rank, None)
                return False
            self._heartbeats.heard(rank)
            if said is None:
                continue
            if isinstance(said, Failed):
                self._died(rank, said.reason)
                return False
            if not isinstance(said, Answer):
                self._heard(rank, said)
                continue
            self._answered[rank] = number = self._answered[rank] + 1  # they answer in order
            self._answers[number].put((rank, said, time.perf_counter_ns()))
        if not ready and not self._heartbeats.wait_seconds(time.monotonic()):
            return self._ask_all()
        return not self._closed and self.failure is None

    def _heard(self, rank: int, said: object) -> None:
        """Take what processes of the user's say beyond answers."""

    def _ask_all(self) -> bool:
        self._heartbeats.begin(time.monotonic())
        for rank, call in self._calls.items():
            prepares = not self._joined or self._answered[rank] < self._asked
            if not self._heartbeats.ask(rank, prepares=prepares):
                self._died(rank, self._silence)
                return False
            call.say_at_once(BEAT)
        return not self._closed

    @property
    def _silence(self) -> str:
        return (
            f"has not answered for rank_timeout_seconds={self._timeout_seconds:g} or longer and "
            "counts as dead: it was stopped, it hangs, or its machine is too busy"
        )

    def _died(self, rank: int, reason: str | None) -> None:
        if self._closed or self.failure is not None:
            return
        how = reason or how_ended(self._processes.get(rank))
        self.failure = RankDiedError(f"rank {rank} of the model {how}")
        self._over.set()
        if self._owns_gpus:
            process_group.abandon()  # a thread may wait for the device
        # The others may wait for it for ever.
        for other in self._calls.values():
            other.hang_up()
        end_processes(list(self._processes.values()))
        for method in list(self._on_death.values()):
            if (call := method()) is not None:
                with contextlib.suppress(MegatronAsyncError):
                    call(self.failure)

    def close(self) -> None:
        """End the other ranks; nothing may be in flight."""
        if self._closed:
            return
        is_busy = any(answered < self._asked for answered in self._answered.values())
        if self.failure is None and self._joined:
            self._stops = True
            with contextlib.suppress(RankDiedError):
                self.tell(Stop())
                for call in self._calls.values():
                    call.say_at_once(OVER)
        self._closed = True
        leaving = None
        # A rank that does not answer may wait in a collective of what has failed here.
        if self.failure is None and self._owns_gpus and self._joined and not is_busy:
            leaving = process_group.leave_together()
        if self._joined:
            wait_for(list(self._processes.values()))
        self._watching.join(EXIT_SECONDS)
        self._end()
        self._abandon.detach()
        if leaving is not None:
            leaving.join(EXIT_SECONDS)
        if self.failure is None and self._owns_gpus and (leaving is None or leaving.is_alive()):
            process_group.abandon()
        self._tidy_up()


def check_free() -> None:
    """Raises ConfigError if this process has a group already, or can have no other one."""
    if parallel.current() is not None:
        raise ConfigError(
            "this process leads the ranks of a model already, and can lead one group at a time: "
            "use with_config() for another engine over that model, close its engine first, or "
            "start another process"
        )
    if _unfinished:
        raise ConfigError(
            "a rank died while this process met it, or the start was interrupted, and "
            "torch.distributed cannot begin again: start a new process"
        )


def _watch(group_of: weakref.ref[RankGroup]) -> None:
    """Watch the ranks in a thread, until the group has ended or nobody has it any more."""
    goes_on = True
    while goes_on:
        group = group_of()
        goes_on = group is not None and group.watch()
        del group


def _has_gpus() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _abandon_on_gpus() -> None:
    """Nobody has closed the group: its other ranks were ended, whatever they did."""
    if _has_gpus():
        process_group.abandon()


def _end_all(processes: list[Child], calls: list[Call], sender: Sender, owns_torch: bool) -> None:
    """End the processes and calls of a group that is closed, or that nobody has any more."""
    end_processes(processes)
    for call in calls:
        call.hang_up()
    sender.close()
    if owns_torch:
        parallel.set_current(None)
        if not _has_gpus():
            process_group.leave()
