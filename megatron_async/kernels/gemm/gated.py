"""SwiGLU in the product in front of it, in steps of many rows."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda

logger = logging.getLogger(__name__)

LEAST_ROWS = 512
"""With fewer cuBLAS, and a kernel for SwiGLU behind it, are as quick."""
LEAST_BUSY = 0.9
"""And so they are where multiprocessors are without a tile for more of the time than the rest."""
_refused: set[tuple[torch.device, torch.dtype]] = set()
"""GPUs and dtypes for which the kernel could not be compiled."""


def is_busy(tiles: int, programs: int) -> bool:
    """Whether ``programs`` that take tile after tile end at about the same time."""
    waves = -(-tiles // programs)
    return tiles >= LEAST_BUSY * waves * programs


def swiglu_of_many(x: Tensor, weight: Tensor) -> Tensor | None:
    """SwiGLU of ``x [..., K]`` times ``weight [2 F, K]``, which is rounded to their dtype first:
    ``[..., F]``. None where a kernel behind cuBLAS's is as quick, and for GPUs and tensors that the
    kernel (``invariant/wide_triton.py``) does not take."""
    (columns, depth), index = weight.shape, x.device.index or 0
    if x.device.type != "cuda" or x.numel() < LEAST_ROWS * depth or not cuda.has_wgmma(index):
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or columns % 2:
        return None
    from megatron_async.kernels.gemm.invariant import wide_triton

    flat, programs = x.reshape(-1, depth).contiguous(), cuda.sm_count(index)
    is_as_quick = not is_busy(wide_triton.tiles(flat.shape[0], columns), programs)
    kind = x.device, x.dtype
    if is_as_quick or kind in _refused or not wide_triton.takes(flat, weight.t()):
        return None
    try:
        out = wide_triton.wide_gated_product(flat, weight.t(), programs)
    except torch.OutOfMemoryError:
        raise  # which is the step's, and says nothing of the kernel
    except wide_triton.REFUSALS as error:
        logger.warning("products with SwiGLU of many rows do not run on this GPU: %s", error)
        _refused.add(kind)
        return None
    return out.view(*x.shape[:-1], columns // 2)
