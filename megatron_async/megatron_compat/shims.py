"""What megatron-core needs to be imported without Transformer Engine, and without CUDA."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

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
