"""The sum of what a row's experts give, in the order of its places, in one Triton kernel.

It adds the second layers' bias, times the experts' weights, and the residual stream, whose partial
statistics it emits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter, uses_pdl

_BLOCK_ROWS, _WARPS = 4, 4
_COLUMNS = (128, 64, 32, 16)


def statistic_rows(hidden: int) -> int:
    """Columns of a program, and elements that one partial statistic covers."""
    return next(size for size in _COLUMNS if hidden % size == 0)


@triton.jit(do_not_specialize=["rows"])
def add_places_kernel(
    given_ptr, ids_ptr, weights_ptr, bias_ptr, residual_ptr, out_ptr, statistics_ptr,
    next_weight_ptr, scaled_ptr, rows,
    HIDDEN: tl.constexpr, PLACES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STATISTICS: tl.constexpr,
    CENTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The grid is ``(HIDDEN / BLOCK_N, rows / BLOCK_T)``."""
    pdl_enter(PDL)
    block = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = t < rows
    at = t[:, None] * HIDDEN + column[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for place in tl.static_range(PLACES):
        number = t * PLACES + place
        chosen = tl.load(ids_ptr + number, mask=in_rows, other=-1)
        is_there = (chosen >= 0)[:, None]
        given = given_ptr + number[:, None] * HIDDEN + column[None, :]
        total += tl.load(given, mask=is_there, other=0.0)
        if HAS_BIAS:
            weight = tl.load(weights_ptr + number, mask=in_rows, other=0.0)
            of_expert = bias_ptr + chosen[:, None] * HIDDEN + column[None, :]
            bias = tl.load(of_expert, mask=is_there, other=0.0)
            total += weight[:, None] * bias.to(tl.float32)
    mask = in_rows[:, None]
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=mask)
    if STATISTICS:
        total = rounded.to(tl.float32)
        mean = tl.zeros([BLOCK_T], tl.float32)
        if CENTER:
            mean = tl.sum(total, 1) / BLOCK_N
            deviation = total - mean[:, None]
            square = tl.sum(deviation * deviation, 1)
        else:
            square = tl.sum(total * total, 1)
            next_weight = tl.load(next_weight_ptr + column).to(tl.float32)
            scaled = (total * next_weight[None, :]).to(scaled_ptr.dtype.element_ty)
            tl.store(scaled_ptr + at, scaled, mask=mask)
        into = statistics_ptr + (t * (HIDDEN // BLOCK_N) + block) * 2
        tl.store(into, mean, mask=in_rows)
        tl.store(into + 1, square, mask=in_rows)


def add_places(
    given: Tensor,
    ids: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    rows: int,
    out: Tensor,
    residual: Tensor | None = None,
    statistics: Tensor | None = None,
    scaled: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``out = sum over places of given + weights * bias[ids], + residual``.

    Args:
        given: fp32 ``[rows * places or more, H]``; places without an expert are not read.
        ids, weights: int32 and fp32 ``[rows or more, places]``.
        bias: bfloat16 ``[experts, H]``.
        out: ``[rows, H]``; may be ``residual``.
        statistics, scaled: see :class:`~..decode.MoeDecode`.
    """
    hidden, columns = out.shape[1], statistic_rows(out.shape[1])
    next_weight, scaled_out = scaled or (out, out)
    pdl = uses_pdl(out.device)
    add_places_kernel[(hidden // columns, triton.cdiv(rows, _BLOCK_ROWS))](
        given, ids, weights, given if bias is None else bias,
        out if residual is None else residual, out,
        weights if statistics is None else statistics, next_weight, scaled_out, rows,
        HIDDEN=hidden, PLACES=ids.shape[1], BLOCK_T=_BLOCK_ROWS, BLOCK_N=columns,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        STATISTICS=statistics is not None, CENTER=scaled is None, PDL=pdl, launch_pdl=pdl,
        num_warps=_WARPS,
    )  # fmt: skip
