"""Whether the elements of a tensor are finite: a Triton kernel that reads them once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BELOW = {torch.bfloat16: math.ldexp(511, 119), torch.float16: 65520.0, torch.float32: math.inf}
"""By dtype: the lowest fp32 magnitude that rounds to infinity."""


@triton.jit
def _mark_not_finite_kernel(x_ptr, mark_ptr, count, below, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    is_finite = tl.abs(x) < below  # false of NaN
    if tl.min(is_finite.to(tl.int32), 0) == 0:
        tl.store(mark_ptr, 1)


def takes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`mark_not_finite` does."""
    return tensor.dtype in DTYPES and dtype in DTYPES and (
        tensor.is_contiguous() or tensor.transpose(0, -1).is_contiguous()
    )  # fmt: skip


def mark_not_finite(tensor: Tensor, dtype: torch.dtype, mark: Tensor) -> None:
    """Set ``mark``, int32 of one element, to 1 if an element of ``tensor`` is not finite, or would
    not be in ``dtype``. It does not wait for the device."""
    count = tensor.numel()
    _mark_not_finite_kernel[(triton.cdiv(count, BLOCK),)](
        tensor, mark, count, BELOW[dtype], BLOCK=BLOCK, num_warps=WARPS
    )
