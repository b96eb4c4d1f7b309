"""SwiGLU in the product in front of it, in steps of many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda

LEAST_ROWS = 2048
"""With fewer cuBLAS, and a kernel for SwiGLU behind it, are as quick."""


def swiglu_of_many(x: Tensor, weight: Tensor) -> Tensor | None:
    """SwiGLU of ``x [..., K]`` times ``weight [2 F, K]``, which is rounded to their dtype first:
    ``[..., F]``. None with few rows, where a kernel behind cuBLAS's is as quick, and for GPUs and
    tensors that the kernel (``invariant/wide_triton.py``) does not take."""
    (columns, depth), index = weight.shape, x.device.index or 0
    if x.device.type != "cuda" or x.numel() < LEAST_ROWS * depth or not cuda.has_wgmma(index):
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or columns % 2:
        return None
    from megatron_async.kernels.gemm.invariant.wide_triton import takes, tiles, wide_gated_product

    flat, programs = x.reshape(-1, depth).contiguous(), cuda.sm_count(index)
    if not takes(flat, weight.t()) or tiles(flat.shape[0], columns) < programs:
        return None
    return wide_gated_product(flat, weight.t(), programs).view(*x.shape[:-1], columns // 2)
