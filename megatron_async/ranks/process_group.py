"""torch.distributed and megatron-core's parallel state for a group of ranks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_async import megatron_compat as compat
from megatron_async.errors import ConfigError
from megatron_async.processes import standard_error
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.rendezvous import unix_group

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0
"""For NCCL to abort what waits for a rank that is gone."""
EXIT_STUCK = 1
_SAYS_SERIALIZED = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_aborting: list[threading.Thread] = []
_device: torch.device | None = None
"""This rank's GPU, since a group was joined."""

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
    global _device
    compat.apply()
    from megatron.core import parallel_state

    _device = device if device.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if is_on_one_host:
        # gloo would listen beside NCCL, which listens here at addresses that are this host's alone.
        backend = "nccl" if device.type == "cuda" else unix_group.BACKEND
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Sends and receives of a group run one after the other: so they do in a graph anyway, and what
    # goes the other way has a group of its own.
    os.environ.setdefault(_SAYS_SERIALIZED, "false")
    if not dist.is_initialized():
        if store is None:
            dist.init_process_group(backend, timeout=START_TIMEOUT)
        else:
            # Without a device_id, with which NCCL would make a communicator for each group of
            # megatron-core's, used or not: seconds at the start, and again at the end.
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=layout.world_size,
                timeout=START_TIMEOUT,
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
    """Forget the parallel state and torch.distributed, so that another group can be joined. All
    ranks are there, or the collectives are those of a CPU."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_together() -> threading.Thread:
    """Begin to :func:`leave` a group whose other ranks do so at the same time: NCCL waits some
    seconds for one that has gone before. The thread that does it may hang if one of them does."""
    thread = threading.Thread(target=leave, name="leaving ranks", daemon=True)
    thread.start()
    return thread


def abandon() -> None:
    """Leave a group of which another rank may be gone; returns at once.

    To destroy it would wait for what is in flight, which may wait for that rank for ever. So NCCL's
    communicators are aborted, which ends their kernels, those of captured graphs too. NCCL frees
    memory then, for which the driver waits for the device, where another kernel may wait for that
    rank. So a thread does it, and waits for the device. If it is not through when the interpreter
    ends, the process ends without it, and the driver takes the device away.
    """
    if _aborting:
        return
    if not _has_nccl():
        return  # collectives of a CPU end with the connections of a rank that has gone
    thread = threading.Thread(target=_abort, name="leaving ranks", daemon=True)
    _aborting.append(thread)
    thread.start()
    if not threading.main_thread().is_alive():
        end_if_stuck()


def end_if_stuck() -> None:
    """End the process, with status 1, if :func:`abandon` is not through after ABORT_SECONDS: the
    interpreter would wait for the device when it ends."""
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in _aborting:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in _aborting):
        end_process("the GPU waits for a rank that has died")


def end_process(reason: str) -> NoReturn:
    """End the process at once, with status 1, where the interpreter's end would wait for ever."""
    logger.critical("%s: this process ends", reason)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    standard_error.drain()
    os._exit(EXIT_STUCK)


atexit.register(end_if_stuck)


def _has_nccl() -> bool:
    if not dist.is_nccl_available() or not dist.is_initialized():
        return False
    return "nccl" in str(dist.get_backend_config())


def _abort() -> None:
    """Abort all groups, the one that was made first last. Their names stay known, so that a
    collective that is called meanwhile gets NCCL's error, and not that there is no group."""
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_names
    gpu = torch.device("cuda")
    assert dist.group.WORLD is not None
    whole = dist.group.WORLD._get_backend(gpu)
    # As one call of NCCL: the abort of one communicator may wait for a kernel of another.
    starts, ends = (getattr(whole, name, _nothing) for name in ("_group_start", "_group_end"))
    starts()
    for group in sorted(groups, key=groups.__getitem__, reverse=True):
        try:
            group._get_backend(gpu).abort()  # that of its CPU, gloo, cannot be
        except RuntimeError as error:  # it has none, or has failed before
            logger.debug("a group was not aborted: %s", error)
    ends()
    # This thread is through when the device is.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(_device)


def _nothing() -> None:
    pass
