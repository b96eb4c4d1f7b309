"""How the ranks of one model come together: started here, or by a launcher such as torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async.config import DEFAULT_RANK_TIMEOUT_SECONDS
from megatron_async.errors import ConfigError, RankDiedError
from megatron_async.ranks.channel import ConnectionSender, RingSender, Sender
from megatron_async.ranks.group import RankGroup, check_free
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.meeting import (
    WAKE,
    Call,
    accept_all,
    environment_number,
    environment_store,
)
from megatron_async.ranks.processes import end_processes, how_ended

FOLLOWER_MODULE = "megatron_async.engine.rank_process"


def launched_rank() -> int | None:
    """This process's rank if a launcher such as torchrun has started several; None if not."""
    if environment_number("WORLD_SIZE", 1) < 2 or "RANK" not in os.environ:
        return None
    return environment_number("RANK", 0)


def device_of_rank(name: str) -> torch.device:
    """``cpu``, or the GPU of this process among those of its host."""
    if name == "cpu":
        return torch.device("cpu")
    index = environment_number("LOCAL_RANK", 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"a rank needs GPU {index} and there are {torch.cuda.device_count()}; use smaller "
            "parallel sizes, or device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start_group(layout: Layout, device: str, timeout_seconds: float) -> RankGroup:
    """The group of which this process becomes rank 0: of processes that it starts on this host, or
    of those that a launcher has started.

    Args:
        device: "cpu" or "cuda".
        timeout_seconds: see :class:`RankGroup`.

    Raises:
        ConfigError: the launcher started another number, this is not rank 0, a GPU is missing, or
            this process leads a group already.
        RankDiedError: one did not start.
    """
    check_free()
    rank = launched_rank()
    if rank is not None:
        if rank != 0:
            raise ConfigError(
                f"this process is rank {rank}: only rank 0 has an engine; call "
                "megatron_async.engine.rank_process.follow() in the others"
            )
        store, _ = environment_store(layout)
        return lead(
            layout, device_of_rank(device), store, layout.world_size,
            timeout_seconds=timeout_seconds,
        )  # fmt: skip
    if device == "cuda" and torch.cuda.device_count() < layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} GPUs and there are {torch.cuda.device_count()}; "
            "use smaller parallel sizes, or device='cpu'"
        )
    if dist.is_initialized():
        raise ConfigError(
            f"torch.distributed is initialised in this process already, and {layout} starts "
            "processes of its own: a process that has loaded a model of one rank, or whose group "
            "has died on GPUs, cannot lead one; start a new process"
        )
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for each in range(1, layout.world_size):
            processes[each] = _spawn(each, layout, device, store.port)
        return lead(
            layout, device_of_rank(device), store, layout.world_size, processes,
            timeout_seconds=timeout_seconds,
        )  # fmt: skip
    except BaseException:
        end_processes(list(processes.values()))
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
    *,
    timeout_seconds: float = DEFAULT_RANK_TIMEOUT_SECONDS,
) -> RankGroup:
    """Be rank 0 of a group whose other ranks :func:`~megatron_async.ranks.follower.join_group` over
    the same store.

    Args:
        timeout_seconds: see :class:`RankGroup`.

    Raises:
        ConfigError: they are of another number, or this process leads a group already.
        RankDiedError: one did not come.
    """
    if world_size != layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} processes and the launcher has started "
            f"{world_size}; make both equal"
        )
    check_free()
    started = processes or {}
    rings: list[RingSender] = []
    calls: dict[int, Call] = {}

    def check() -> None:
        for rank, process in started.items():
            if process.poll() is not None:
                raise RankDiedError(f"rank {rank} did not start: it {how_ended(process)}")

    def make_ring() -> str:
        rings.append(
            RingSender(world_size - 1, lambda place: calls[place + 1].say(WAKE), check_all)
        )
        return rings[0].name

    def check_all() -> None:
        if (group := made[0]()) is not None:
            group.check()

    made: list[weakref.ref[RankGroup]] = []
    own = dist.PrefixStore("ranks", store)
    try:
        calls.update(accept_all(own, world_size, make_ring, check)[0])
    except BaseException:
        for ring in rings:
            ring.unlink()
        raise
    senders: list[Sender] = [*rings]
    if not rings:
        senders = [ConnectionSender([calls[rank].say for rank in sorted(calls)])]
    group = RankGroup(layout, senders[0], calls, started, timeout_seconds)
    made.append(weakref.ref(group))
    try:
        group.join(device, dist.PrefixStore("torch", store))
    except BaseException:
        group.close()
        raise
    finally:  # all have it, or never will, and nothing is left behind whatever happens from now on
        for ring in rings:
            ring.unlink()
    return group
