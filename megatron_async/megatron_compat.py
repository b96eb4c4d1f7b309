"""Everything megatron-core needs to run without a launcher, and on machines without CUDA.

:func:`apply` must run before the first import of any other megatron module, so each module of
this package that imports megatron imports this one first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_async.errors import ConfigError
from megatron_async.ranks.unix_group import BACKEND

logger = logging.getLogger(__name__)

_QUIET = (
    ".*Transformer Engine and Apex are not installed.*",
    ".*Apex is not installed.*",
    ".*`inference_params` renamed to `inference_context`.*",
    ".*MLP requires ffn_hidden_size.*",
    ".*tp_group is None, using default tp group.*",
    ".*sequence parallelism must be used.*",
    ".*full scope is deprecated.*",
    ".*custom_layers.transformer_engine.*",
)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """``torch.compile`` is a decorator that does nothing."""

    def decorate(function: Any = None, **options: Any) -> Any:
        return decorate if function is None else function

    module: Any = torch
    compiles = torch.compile
    module.compile = decorate
    try:
        yield
    finally:
        module.compile = compiles


@functools.cache
def apply() -> None:
    """Install the shims; calling it again does nothing.

    Without CUDA, ``torch.cuda.current_device`` names the CPU and ``torch.cuda.synchronize`` does
    nothing, because megatron allocates on the "current device". With CUDA neither is touched.
    """
    for message in _QUIET:
        warnings.filterwarnings("ignore", message=message)
    if not torch.cuda.is_available():
        cuda: Any = torch.cuda
        cuda.current_device = lambda: torch.device("cpu")
        cuda.synchronize = lambda device=None: None
    # megatron's fuser is torch.compile: each new shape would cost seconds, and its import one. It
    # decorates at import time, some functions before it can be disabled.
    with _quiet(), _uncompiled():
        from megatron.core import jit

        if "megatron.core.models.gpt.gpt_model" in sys.modules:
            logger.info("megatron-core was imported before megatron_async: its jit fuser stays on")
        jit.disable_jit_fuser()
        import megatron.core.models.gpt.gpt_model  # noqa: F401
        from megatron.core.transformer.moe import moe_utils

        # Without Transformer Engine the name is unbound, and MoE routing raises NameError.
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None
        from megatron.core.transformer import multi_latent_attention as latents

        # Without it multi-latent attention takes Transformer Engine for installed.
        if latents.HAVE_TE and not isinstance(latents.TELinear, type):
            latents.HAVE_TE = False


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


apply()
