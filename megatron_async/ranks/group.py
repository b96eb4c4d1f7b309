"""The ranks of one model, as rank 0 has them: their start, what they are told, their death."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async import errors
from megatron_async.errors import (
    CheckpointError,
    ConfigError,
    MegatronAsyncError,
    RankDiedError,
)
from megatron_async.models import parallel
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks import process_group
from megatron_async.ranks.channel import ConnectionSender, RingSender, Sender
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.meeting import WAKE, Call, accept_all, environment_store
from megatron_async.ranks.messages import Message, ReadWeights, ReplaceWeights, Stop, encode

FOLLOWER_MODULE = "megatron_async.engine.rank_process"
EXIT_SECONDS = 5.0
"""For a rank that was told to end, or has hung up."""
EXPLAIN_SECONDS = 3.0
"""For the connection to a rank to say that it has died, when a collective has."""


class RankGroup:
    """Rank 0's hold on the others. One for each process, at a time.

    Args:
        calls: connections by rank.
        processes: those that this process has started, by rank.

    Attributes:
        parallel: rank 0's own place.
        model_path: the directory of the model; None of random weights.
        failure: why the group has ended; None while it lives.
    """

    def __init__(
        self,
        layout: Layout,
        place: ModelParallel,
        sender: Sender,
        calls: dict[int, Call],
        processes: dict[int, subprocess.Popen[bytes]],
    ) -> None:
        self.layout = layout
        self.parallel = place
        self.failure: RankDiedError | None = None
        self.model_path: str | None = None
        self._sender = sender
        self._calls = calls
        self._processes = processes
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = False
        self._engines = 0
        self._on_death: dict[int, Callable[[RankDiedError], None]] = {}
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()
        self._end = weakref.finalize(self, _end_all, list(processes.values()), sender)

    @property
    def pids(self) -> dict[int, int]:
        """Of the processes that this one has started, by rank."""
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
        data = encode(message)
        with self._sending:
            self.check()
            self._sender.send(data)

    def await_answers(self) -> None:
        """Wait until all ranks have done the last message that is answered.

        Raises:
            MegatronAsyncError: one could not, of the type that it met.
            RankDiedError: the group has ended.
        """
        failed: str | None = None
        for _ in self._calls:
            failed = self._answer() or failed
        if failed is not None:
            raise _error_of(failed)

    def read_weights(
        self, source: object, allow_non_finite_weights: bool, read: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Have each rank read its share of new weights; ``read`` does it here. Calling the result
        replaces them on all ranks; then nothing may be in flight.

        Raises:
            CheckpointError: they do not fit on some rank, or are not in a directory.
        """
        if not isinstance(source, (str, Path)):
            raise CheckpointError(
                f"the new weights are a {type(source).__name__}, and each of the model's "
                f"{self.layout.world_size} ranks reads its own share: give a model directory"
            )
        self.tell(ReadWeights(str(source), allow_non_finite_weights))
        failed: MegatronAsyncError | None = None
        try:
            replace = read()
        except MegatronAsyncError as error:
            failed = error
        self.await_answers()
        if failed is not None:
            raise failed

        def replace_all() -> None:
            self.tell(ReplaceWeights())
            replace()
            self.await_answers()

        return replace_all

    def _answer(self) -> str | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=0.1)
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
        """Have ``call`` called, in a thread of the group's, for engine ``number``."""
        self._on_death[number] = call
        if self.failure is not None:
            call(self.failure)

    def forget(self, number: int) -> None:
        """Engine ``number`` is closed."""
        self._on_death.pop(number, None)

    def _watch(self) -> None:
        calls = {call: rank for rank, call in self._calls.items()}
        while not self._closed:
            for ready in wait(list(calls), timeout=1.0):
                call = ready
                try:
                    said = json.loads(call.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError, ValueError):
                    self._died(calls[call], None)  # type: ignore[index]
                    return
                if "failed" in said:
                    self._died(calls[call], said["failed"])  # type: ignore[index]
                    return
                self._answers.put(json.dumps(said["error"]) if said.get("error") else None)

    def _died(self, rank: int, reason: str | None) -> None:
        if self._closed:
            return
        how = reason or _how_ended(self._processes.get(rank))
        self.failure = RankDiedError(f"rank {rank} of the model {how}")
        self._over.set()
        # The others may wait for it for ever.
        _end_processes(list(self._processes.values()))
        for other in self._calls.values():
            other.close()
        for call in list(self._on_death.values()):
            with contextlib.suppress(MegatronAsyncError):
                call(self.failure)

    def close(self) -> None:
        """End the other ranks; nothing may be in flight."""
        if self._closed:
            return
        if self.failure is None:
            with contextlib.suppress(RankDiedError):
                self.tell(Stop())
        self._closed = True
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._end()
        self._watching.join(EXIT_SECONDS)
        for call in self._calls.values():
            call.close()
        parallel.set_current(None)
        # Kernels of NCCL that wait for a dead rank would be waited for.
        if self.failure is None or not dist.is_nccl_available() or not torch.cuda.is_available():
            process_group.leave()


def _how_ended(process: subprocess.Popen[bytes] | None) -> str:
    status = None
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(EXIT_SECONDS)
    if status is None:
        return "has hung up"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end_all(processes: list[subprocess.Popen[bytes]], sender: Sender) -> None:
    _end_processes(processes)
    sender.close()


def _end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _error_of(said: str) -> MegatronAsyncError:
    """The error that another rank met."""
    rank, name, message = json.loads(said)
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, MegatronAsyncError)):
        return RankDiedError(f"rank {rank}: {name}: {message}")
    found: MegatronAsyncError = kind(f"rank {rank}: {message}")
    return found


# --- start ------------------------------------------------------------------------------------


def launched_rank() -> int | None:
    """This process's rank if a launcher such as torchrun has started several; None if not."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) < 2 or "RANK" not in os.environ:
        return None
    return int(os.environ["RANK"])


def device_of_rank(name: str) -> torch.device:
    """``cpu``, or the GPU of this process among those of its host."""
    if name == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"a rank needs GPU {index} and there are {torch.cuda.device_count()}; use smaller "
            "parallel sizes, or device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start_group(layout: Layout, device: str) -> RankGroup:
    """The group of which this process becomes rank 0: of processes that it starts on this host, or
    of those that a launcher has started.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the launcher started another number, this is not rank 0, or a GPU is missing.
        RankDiedError: one did not start.
    """
    rank = launched_rank()
    if rank is not None:
        store, rank, world_size = environment_store()
        if rank != 0:
            raise ConfigError(
                f"this process is rank {rank}: only rank 0 has an engine; call "
                "megatron_async.engine.rank_process.follow() in the others"
            )
        return lead(layout, device_of_rank(device), store, world_size)
    if device == "cuda" and torch.cuda.device_count() < layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} GPUs and there are {torch.cuda.device_count()}; "
            "use smaller parallel sizes, or device='cpu'"
        )
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    processes = {
        each: _spawn(each, layout, device, store.port) for each in range(1, layout.world_size)
    }
    try:
        return lead(layout, device_of_rank(device), store, layout.world_size, processes)
    except BaseException:
        _end_processes(list(processes.values()))
        raise


def _spawn(rank: int, layout: Layout, device: str, port: int) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    own = {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": str(rank)}
    sizes = [str(size) for size in (layout.tensor, layout.pipeline, layout.expert)]
    return subprocess.Popen(
        [sys.executable, "-m", FOLLOWER_MODULE, device, str(port), str(os.getpid()), *sizes],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **own, "PYTHONPATH": path},
    )


def lead(
    layout: Layout,
    device: torch.device,
    store: dist.Store,
    world_size: int,
    processes: dict[int, subprocess.Popen[bytes]] | None = None,
) -> RankGroup:
    """Be rank 0 of a group whose other ranks :func:`~megatron_async.ranks.follower.join_group` over
    the same store.

    Raises:
        ConfigError: they are of another number.
        RankDiedError: one did not come.
    """
    if world_size != layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} processes and the launcher has started "
            f"{world_size}; make both equal"
        )
    started = processes or {}
    rings: list[RingSender] = []
    calls: dict[int, Call] = {}

    def check() -> None:
        for rank, process in started.items():
            if process.poll() is not None:
                raise RankDiedError(f"rank {rank} did not start: it {_how_ended(process)}")

    def make_ring() -> str:
        rings.append(
            RingSender(world_size - 1, lambda place: calls[place + 1].say(WAKE), check_all)
        )
        return rings[0].name

    def check_all() -> None:
        made[0].check()

    made: list[RankGroup] = []
    own = dist.PrefixStore("ranks", store)
    calls.update(accept_all(own, world_size, make_ring, check)[0])
    process_group.join(layout, device, dist.PrefixStore("torch", store))
    if rings:  # all have it, and nothing is left behind whatever happens from now on
        rings[0].unlink()
    place = ModelParallel(layout, 0, device)
    parallel.set_current(place)
    senders: list[Sender] = [*rings]
    if not rings:
        senders = [ConnectionSender([calls[rank].say for rank in sorted(calls)])]
    made.append(RankGroup(layout, place, senders[0], calls, started))
    return made[0]
