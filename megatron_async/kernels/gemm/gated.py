"""SwiGLU in the product in front of it, in steps of many rows, or of as many as fill a tile."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda

logger = logging.getLogger(__name__)

LEAST_ROWS = 512
"""With fewer cuBLAS, and a kernel for SwiGLU behind it, are as quick, unless all fill one tile."""
LEAST_BUSY = 0.9
"""And so they are where multiprocessors are without a tile for more of the time than the rest."""
TILE_ROWS = range(113, 129)
"""Rows of a step that fill a tile. Reading the weights is what takes the time then, so that few
multiprocessors may be without a tile, and none may have two. On an H200, us of both kernels and of
this one at 128 rows: fc1 of Llama-8B 69.6 and 65.8, Qwen2.5-14B 82.8 and 75.2, Llama-2-7B 53.8 and
52.1, Qwen3-8B 57.5 and 56.7; with 148 tiles 76.7 and 101.9, with 56 tiles 36.1 and 44.5."""
LEAST_READING = 0.65
_refused: set[tuple[torch.device, torch.dtype]] = set()
"""GPUs and dtypes for which the kernel could not be compiled."""


def is_busy(tiles: int, programs: int) -> bool:
    """Whether ``programs`` that take tile after tile end at about the same time."""
    waves = -(-tiles // programs)
    return tiles >= LEAST_BUSY * waves * programs


def is_quicker(rows: int, tiles: int, programs: int) -> bool:
    """Whether the kernel is, by what was measured, for ``tiles`` tiles of all rows."""
    if rows in TILE_ROWS:
        return LEAST_READING * programs <= tiles <= programs
    return rows >= LEAST_ROWS and is_busy(tiles, programs)


def swiglu_of_many(x: Tensor, weight: Tensor) -> Tensor | None:
    """SwiGLU of ``x [..., K]`` times ``weight [2 F, K]``, which is rounded to their dtype first:
    ``[..., F]``. None where a kernel behind cuBLAS's is as quick, and for GPUs and tensors that the
    kernel (``invariant/wide_triton.py``) does not take."""
    (columns, depth), index = weight.shape, x.device.index or 0
    few = x.numel() < TILE_ROWS.start * depth
    if x.device.type != "cuda" or few or not cuda.has_wgmma(index):
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or columns % 2:
        return None
    from megatron_async.kernels.gemm.invariant import wide_triton

    flat, programs = x.reshape(-1, depth).contiguous(), cuda.sm_count(index)
    rows, kind = flat.shape[0], (x.device, x.dtype)
    pays = is_quicker(rows, wide_triton.tiles(rows, columns), programs)
    if not pays or kind in _refused or not wide_triton.takes(flat, weight.t()):
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
