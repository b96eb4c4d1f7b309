"""``torch.distributed`` and megatron's ``parallel_state`` without a launcher."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from megatron_async.errors import ConfigError
from megatron_async.megatron_compat.shims import apply
from megatron_async.ranks.rendezvous.unix_group import BACKEND

_made: Counter[str] = Counter()
"""Groups that members have made, by their ranks."""


def new_group_of_members(ranks: list[int]) -> Any:
    """A group that ``ranks`` of ``torch.distributed`` make, and nobody else; None elsewhere.

    torch would name it by the number of groups that each of them is in, which megatron-core's
    groups let differ between them: they would wait for each other under different names.
    """
    key = "_".join(map(str, ranks))
    _made[key] += 1
    name = f"megatron_async_{key}_{_made[key]}"
    with mock.patch.object(distributed_c10d, "_process_group_name", lambda *_, **__: name):
        group = dist.new_group(ranks, use_local_synchronization=True)
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group


def ensure_parallel_state(tensor: int = 1) -> None:
    """Initialise ``torch.distributed`` and megatron's ``parallel_state`` where they are not yet.

    One process needs neither a launcher nor a port. More than one needs the environment of a
    launcher (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).

    Args:
        tensor: tensor-parallel size.

    Raises:
        ConfigError: the number of processes does not fit, the environment is only part of a
            launcher's, or megatron is already initialised with another tensor-parallel size.
    """
    apply()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        _init_processes(tensor)
    if not parallel_state.model_parallel_is_initialized():
        if dist.get_world_size() % tensor:
            raise ConfigError(
                f"tensor parallel size {tensor} does not divide the number of processes "
                f"{dist.get_world_size()}"
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, create_gloo_process_groups=False
        )
    actual = parallel_state.get_tensor_model_parallel_world_size()
    if actual != tensor:
        raise ConfigError(
            f"megatron is initialised with tensor parallel size {actual}, not {tensor}: "
            "use that size, or call parallel_state.destroy_model_parallel() first"
        )


def _init_processes(tensor: int) -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    try:
        if int(world_size) > 1:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            return
    except ValueError as error:  # a variable is missing, or is not a number
        raise ConfigError(
            f"WORLD_SIZE={world_size!r} is set, but not as a launcher does ({error}): unset it "
            "for one process, or start with torchrun"
        ) from error
    if tensor > 1:
        raise ConfigError(
            f"tensor parallel size {tensor} needs {tensor} processes: start with "
            f"torchrun --nproc-per-node {tensor}"
        )
    # One process never communicates: no backend that would listen, or start a watchdog thread.
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=1)
