"""torch.distributed and megatron-core's parallel state for a group of ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async import megatron_compat as compat
from megatron_async.errors import ConfigError
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.rendezvous import unix_group

START_TIMEOUT = timedelta(minutes=10)
"""For ranks to find each other, and for a collective."""


def join(
    layout: Layout,
    device: torch.device,
    store: dist.Store | None = None,
    rank: int = 0,
    is_on_one_host: bool = False,
) -> int:
    """Initialise torch.distributed, unless somebody has, and megatron-core's parallel state.

    Args:
        device: a GPU takes NCCL; a CPU takes gloo, or Unix sockets on one host.
        store: where the ranks meet; None takes the environment of a launcher.
        rank: this process's, with a ``store``.
        is_on_one_host: all ranks are.

    Returns:
        This process's rank.

    Raises:
        ConfigError: another group is there, or the launcher started another number of processes.
    """
    compat.apply()
    from megatron.core import parallel_state

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if is_on_one_host:
        # gloo would listen beside NCCL, which listens here at addresses that are this host's alone.
        backend = "nccl" if device.type == "cuda" else unix_group.BACKEND
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        if store is None:
            dist.init_process_group(backend, timeout=START_TIMEOUT)
        else:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=layout.world_size,
                timeout=START_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
    if dist.get_world_size() != layout.world_size:
        raise ConfigError(
            f"{layout} needs {layout.world_size} processes and this group has "
            f"{dist.get_world_size()}: change the parallel sizes, or start so many; a process that "
            "has loaded a model of one rank before cannot lead a group"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1 if layout.expert > 1 else None,
            create_gloo_process_groups=False,
        )
    _check_sizes(layout)
    return int(dist.get_rank())


def _check_sizes(layout: Layout) -> None:
    from megatron.core import parallel_state

    found = Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if found != layout:
        raise ConfigError(
            f"megatron-core is initialised as {found}, and {layout} is asked for: use those sizes, "
            "or call parallel_state.destroy_model_parallel() first"
        )


def leave() -> None:
    """Forget the parallel state and torch.distributed, so that another group can be joined."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
