"""Residual addition, norm, and the normed rows as e4m3 for the linear layer behind it.

:func:`~megatron_async.kernels.norm.add_norm.add_norm` and
:func:`~megatron_async.kernels.gemm.e4m3_inputs.quantize_inputs` in one Triton kernel: what is
quantized is the normed row as it is rounded, and it is not read again.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.gemm.e4m3_inputs import (
    empty_inputs,
    rounds_once,
    store_row,
    tile_of,
)
from megatron_async.kernels.gemm.scaled_e4m3 import Sums, scaled_sums
from megatron_async.kernels.pdl import pdl_enter, uses_pdl


@triton.jit
def _norm_inputs_kernel(
    x_ptr, x_bias_ptr, residual_ptr, weight_ptr, bias_ptr, hidden_ptr, out_ptr, static_ptr,
    numbers_ptr, scale_ptr, row_scale_ptr, column_scale_ptr, groups, width, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, IS_SUMS: tl.constexpr, HAS_X_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, CENTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    OFFSET: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, HAS_OUT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. The sum is rounded before the statistics, which see what the next layer sees."""
    row = tl.program_id(0).to(tl.int64)
    columns = groups * width
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (group < groups) & (place < width)
    column = group * width + place
    if PDL:  # it comes from memory while the kernel in front still runs
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    pdl_enter(PDL)
    at = row * columns + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if IS_SUMS:
        column_scale = tl.load(column_scale_ptr + column, mask=mask, other=0.0)
        x = scaled_sums(x, tl.load(row_scale_ptr + row), column_scale)
        x = x.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    if HAS_X_BIAS:
        x += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        summed = x.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at, summed, mask=mask)
        x = summed.to(tl.float32)
    if CENTER:
        x = tl.where(mask, x - tl.sum(tl.sum(x, 1), 0) / columns, 0.0)
    out = x * (1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / columns + eps))
    if not PDL:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    out *= weight.to(tl.float32) + OFFSET
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    rounded = out.to(out_ptr.dtype.element_ty)
    if HAS_OUT:
        tl.store(out_ptr + at, rounded, mask=mask)
    x = tl.where(mask, rounded.to(tl.float32), 0.0)
    store_row(
        x, row, static_ptr, numbers_ptr, scale_ptr, groups, width, GROUPS, WIDTH, STATIC, NATIVE
    )


def add_norm_inputs(
    x: Tensor | Sums,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    *,
    groups: int,
    static: Tensor | None = None,
    center: bool = False,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """``hidden = x + x_bias + residual``, its norm, and that as e4m3.

    Args:
        x, residual, weight, bias, eps, x_bias, center, offset: as of ``add_norm``. Sums are first
            multiplied by their scales, and rounded to the dtype of the residual, which must be
            there.
        groups, static: as of ``quantize_inputs``, whose ``takes`` says which rows.

    Returns:
        ``hidden`` and the normed ``hidden``, both like ``x``, or like the residual, and numbers and
        scales of the second. A row's bits depend on it alone.
    """
    is_sums = isinstance(x, Sums)
    given, *scales_of_sums = x if isinstance(x, Sums) else (x, weight, weight)
    flat, like = given.contiguous(), given
    if is_sums:
        assert residual is not None
        like = residual
    columns = like.shape[-1]
    hidden = flat if residual is None else like.new_empty(like.shape)
    out = like.new_empty(like.shape)
    numbers, scale = empty_inputs(out, columns, groups)
    if out.numel():
        _norm_inputs_kernel[(out.numel() // columns,)](
            flat, flat if x_bias is None else x_bias,
            flat if residual is None else residual.contiguous(), weight,
            weight if bias is None else bias, hidden, out, scale if static is None else static,
            numbers.view(torch.uint8), scale, *scales_of_sums, groups, columns // groups, eps,
            IS_SUMS=is_sums, HAS_X_BIAS=x_bias is not None and residual is not None,
            HAS_RESIDUAL=residual is not None, CENTER=center, HAS_BIAS=bias is not None,
            OFFSET=offset, STATIC=static is not None, NATIVE=rounds_once(out.device), HAS_OUT=True,
            PDL=False, **tile_of(columns, groups)[1],
        )  # fmt: skip
    return hidden, out, (numbers, scale)


def norm_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    numbers: Tensor,
    scale: Tensor,
    static: Tensor | None,
    center: bool,
) -> None:
    """The norm of ``x [R, k]``, contiguous, as e4m3 with one scale a row, into ``numbers [R, k]``
    and ``scale [R, 1]``: those of :func:`add_norm_inputs`; between kernels of a fused step."""
    (rows, columns), pdl = x.shape, uses_pdl(x.device)
    if rows:
        _norm_inputs_kernel[(rows,)](
            x, x, x, weight, weight if bias is None else bias, x, x,
            scale if static is None else static, numbers.view(torch.uint8), scale, weight, weight,
            1, columns, eps,
            IS_SUMS=False, HAS_X_BIAS=False, HAS_RESIDUAL=False, CENTER=center,
            HAS_BIAS=bias is not None,
            OFFSET=0.0, STATIC=static is not None, NATIVE=rounds_once(x.device), HAS_OUT=False,
            PDL=pdl, **tile_of(columns, 1)[1], launch_pdl=pdl,
        )  # fmt: skip
