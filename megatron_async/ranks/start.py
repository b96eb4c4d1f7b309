"""How the ranks of one model come together: started here, or by a launcher such as torchrun."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from megatron_async.config.engine_config import DEFAULT_RANK_TIMEOUT_SECONDS
from megatron_async.errors import ConfigError
from megatron_async.processes.call import Call
from megatron_async.processes.child import Child, end_processes
from megatron_async.ranks.channel import ConnectionSender, RingSender, Sender
from megatron_async.ranks.group import RankGroup, check_free
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.open_files import check_files
from megatron_async.ranks.rendezvous.call import WAKE
from megatron_async.ranks.rendezvous.meeting import (
    accept_all,
    environment_number,
    environment_store,
)
from megatron_async.ranks.rendezvous.shared import Shared, make_folder, remove_folder

FOLLOWER_MODULE = "megatron_async.build.rank_process"

MAX_CPU_RANKS = 16
"""Processes of a group on a CPU that has fewer cores. Each takes 140 MB before it has a model."""


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
    check_files(layout)
    rank = launched_rank()
    if rank is not None:
        if rank != 0:
            raise ConfigError(
                f"this process is rank {rank}: only rank 0 has an engine; call "
                "megatron_async.build.rank_process.follow() in the others"
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
    most = max(MAX_CPU_RANKS, os.cpu_count() or 1)
    if device == "cpu" and layout.world_size > most:
        raise ConfigError(
            f"{layout} needs {layout.world_size} processes, and on the CPU of this machine the "
            f"most is {most}; use smaller parallel sizes"
        )
    if dist.is_initialized():
        raise ConfigError(
            f"torch.distributed is initialised in this process already, and {layout} starts "
            "processes of its own: a process that has loaded a model of one rank, or whose group "
            "has died on GPUs, cannot lead one; start a new process"
        )
    calls: dict[int, Call] = {}
    processes: dict[int, Child] = {}
    common = Common(layout.world_size, calls)
    try:
        for each in range(1, layout.world_size):
            processes[each], calls[each] = _spawn(each, layout, device, common.shared)
        return _begin(layout, device_of_rank(device), calls, processes, common, timeout_seconds)
    except BaseException:
        end_processes(list(processes.values()))
        common.remove()
        raise


def _spawn(rank: int, layout: Layout, device: str, shared: Shared) -> tuple[Child, Call]:
    """A rank that has its connection from its first line on."""
    sizes = [str(size) for size in (layout.tensor, layout.pipeline, layout.expert)]
    place = {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": str(rank)}
    process = Child(FOLLOWER_MODULE, [device, *sizes], environment=place, prepare=shared.hand_to)
    return process, Call(process.connection.detach())


class Common:
    """What ranks of one host share, as rank 0 has made it.

    Args:
        calls: by rank, as soon as there are any.
    """

    def __init__(self, world_size: int, calls: dict[int, Call]) -> None:
        self._group: weakref.ref[RankGroup] | None = None

        def check() -> None:
            if self._group is not None and (group := self._group()) is not None:
                group.check()

        self.sender = RingSender(world_size - 1, lambda place: calls[place + 1].say(WAKE), check)
        self.shared = Shared(make_folder(), self.sender.descriptor)

    def belongs_to(self, group: RankGroup) -> None:
        """Waits for room end with the group."""
        self._group = weakref.ref(group)

    def remove(self) -> None:
        """The group has not begun."""
        self.sender.close()
        remove_folder(self.shared.folder)


def lead(
    layout: Layout,
    device: torch.device,
    store: dist.Store,
    world_size: int,
    *,
    timeout_seconds: float = DEFAULT_RANK_TIMEOUT_SECONDS,
) -> RankGroup:
    """Be rank 0 of a group whose other ranks :func:`~megatron_async.ranks.follower.join_group` over
    the same store.

    Args:
        timeout_seconds: see :class:`RankGroup`.

    Raises:
        ConfigError: they are of another number, or this process leads a group already, or they are
            on several hosts and have no secret.
        RankDiedError: one did not come.
    """
    if world_size != layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} processes and the launcher has started "
            f"{world_size}; make both equal"
        )
    check_free()
    calls: dict[int, Call] = {}
    made: list[Common] = []

    def share() -> Shared:
        made.append(Common(world_size, calls))
        return made[0].shared

    try:
        own = dist.PrefixStore("ranks", store)
        calls.update(accept_all(own, world_size, share, lambda: None)[0])
        common = made[0] if made else None
        return _begin(layout, device, calls, {}, common, timeout_seconds, store)
    except BaseException:
        for each in made:
            each.remove()
        raise


def _begin(
    layout: Layout,
    device: torch.device,
    calls: dict[int, Call],
    processes: dict[int, Child],
    common: Common | None,
    timeout_seconds: float,
    store: dist.Store | None = None,
) -> RankGroup:
    """Meet ranks that are connected; those without anything in ``common`` are on other hosts."""
    if common is None:
        assert store is not None
        sender: Sender = ConnectionSender([calls[rank].say for rank in sorted(calls)])
        group = RankGroup(layout, sender, calls, processes, timeout_seconds)
        meeting: dist.Store = dist.PrefixStore("torch", store)
    else:
        group = RankGroup(
            layout, common.sender, calls, processes, timeout_seconds, common.shared.folder
        )
        common.belongs_to(group)
        meeting = dist.FileStore(common.shared.store, layout.world_size)
    try:
        group.join(device, meeting)
    except BaseException:
        group.close()
        raise
    return group
