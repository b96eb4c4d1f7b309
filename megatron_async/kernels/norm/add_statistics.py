"""Residual addition, and what a skinny GEMM needs to norm the sum as it reads it.

The fused decode blocks (``models/fused``) hand the residual stream from one to the next together
with its partial statistics and, before an RMSNorm, the stream times that norm's weight. The
epilogue of a row-parallel GEMM emits all that. Where an all-reduce comes between the GEMM and the
addition, or a module of megatron-core took the GEMM's place, this kernel does it: one Triton kernel
that reads 2 T N elements and writes T N, or 2 T N before an RMSNorm.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter, uses_pdl

MAX_COLUMNS = 32768
"""A row is one program's tile; longer ones go to the reference."""


@triton.jit
def _add_statistics_kernel(
    x_ptr, x_bias_ptr, residual_ptr, hidden_ptr, statistics_ptr, weight_ptr, scaled_ptr, columns,
    BLOCK: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    STATISTICS: tl.constexpr, CENTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. The sum is rounded before the statistics, which see what the next block sees."""
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    at = row * columns + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_X_BIAS:
        x += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rounded = x.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + at, rounded, mask=mask)
    x = rounded.to(tl.float32)
    if STATISTICS:
        mean = 0.0
        if CENTER:
            mean = tl.sum(x, 0) / columns
            deviation = tl.where(mask, x - mean, 0.0)
            square = tl.sum(deviation * deviation, 0)
        else:
            square = tl.sum(x * x, 0)
            weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + at, (x * weight).to(scaled_ptr.dtype.element_ty), mask=mask)
        tl.store(statistics_ptr + row * 2, mean)
        tl.store(statistics_ptr + row * 2 + 1, square)


def add_statistics(
    x: Tensor,
    residual: Tensor | None,
    hidden: Tensor,
    *,
    x_bias: Tensor | None = None,
    statistics: Tensor | None = None,
    scaled: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``hidden = x + x_bias + residual``, and what the skinny GEMM that norms it wants to know.

    Args:
        x: ``[T, N]``.
        residual: ``[T, N]``, may be ``hidden``; None adds nothing.
        hidden: ``[T, N]``, contiguous, overwritten.
        x_bias: ``[N]``.
        statistics: fp32 ``[T, 1, 2]``, contiguous, overwritten: with ``scaled`` (0, sum of squares)
            of each row, without it (mean, sum of squared deviations). That is what
            ``kernels/gemm/skinny_gemm.py`` takes, in a single tile. None computes none.
        scaled: the weight ``[N]`` of the RMSNorm that comes next, and where ``hidden`` times it
            goes, ``[T, N]``, contiguous.
    """
    columns = hidden.shape[-1]
    if columns > MAX_COLUMNS:
        return add_statistics_reference(
            x, residual, hidden, x_bias=x_bias, statistics=statistics, scaled=scaled
        )
    if not hidden.numel():
        return None
    weight, scaled_out = scaled or (hidden, hidden)
    block = triton.next_power_of_2(columns)
    pdl = uses_pdl(hidden.device)
    _add_statistics_kernel[(hidden.numel() // columns,)](
        x.contiguous(), hidden if x_bias is None else x_bias,
        hidden if residual is None else residual.contiguous(), hidden,
        hidden if statistics is None else statistics, weight, scaled_out, columns,
        BLOCK=block, HAS_X_BIAS=x_bias is not None, HAS_RESIDUAL=residual is not None,
        STATISTICS=statistics is not None, CENTER=scaled is None, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return None


def add_statistics_reference(
    x: Tensor,
    residual: Tensor | None,
    hidden: Tensor,
    *,
    x_bias: Tensor | None = None,
    statistics: Tensor | None = None,
    scaled: tuple[Tensor, Tensor] | None = None,
) -> None:
    """:func:`add_statistics` with PyTorch."""
    total = x.float()
    if x_bias is not None:
        total = total + x_bias.float()
    if residual is not None:
        total = total + residual.float()
    hidden.copy_(total)
    if statistics is None:
        return
    wide = hidden.float()
    mean = wide.mean(1) if scaled is None else torch.zeros_like(wide[:, 0])
    statistics[:, 0, 0] = mean
    statistics[:, 0, 1] = (wide - mean[:, None]).square().sum(1)
    if scaled is not None:
        weight, out = scaled
        out.copy_(hidden * weight)
