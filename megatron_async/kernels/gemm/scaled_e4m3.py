"""Products of e4m3 by e4m3 with scales by row, or by row and group of columns.

Scales by row: cuBLAS's kernel (``torch._scaled_mm``); with few results its faster one of a scale
for all, and a kernel that multiplies the sums in fp32 by both scales. Scales of groups, and results
that may not depend on the number of rows: a Triton kernel, whose sums leave the tensor cores for
fp32 registers every 128 columns or with each group, since Hopper's add e4m3 up in fewer bits
(DeepSeek-V3, arXiv:2412.19437, 3.3.2). The reference is ``models/quantized/inputs.py``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.gemm.invariant.products_triton import GROUP_M, Tile
from megatron_async.kernels.pdl import pdl_enter, uses_pdl
from megatron_async.kernels.shared_memory import block_limit, first_that_fits, loop_buffers

DEPTH = 128
"""Columns of a stage, and of what the tensor cores add up by themselves."""
LEAST_DEPTH = 32
FAST_ACCUMULATION = False
"""cuBLAS adds all columns up in the tensor cores' fewer bits. Measure before it is turned on
(``scripts/bench_prefill.py --products``)."""
ONE_SCALE_ROWS, ONE_SCALE_RESULTS = 256, 2**20
"""Most rows, and most results, that cuBLAS adds up without scales: with more, writing sums in fp32
and reading them again costs more than its kernel for scales by row loses. By times of cuBLAS alone,
on an H200."""
SCALE_BLOCK, SCALE_WARPS = 1024, 4
FEW_ROWS = Tile(64, 128, DEPTH, num_warps=4, num_stages=4)
MANY_ROWS = Tile(128, 128, DEPTH, num_warps=8, num_stages=4)


class Sums(NamedTuple):
    """A product that is added up, and not yet multiplied by its scales.

    Args:
        sums: fp32 ``[rows, n]``.
        scale: fp32 ``[rows, 1]``, of the rows.
        weight_scale: fp32 ``[n, 1]``, of the weight's.
    """

    sums: Tensor
    scale: Tensor
    weight_scale: Tensor


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, rows, columns, depth, groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``WIDTH``: columns that share a scale, a multiple of BLOCK_K; 0 for all of a row."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first_tile = program // per_group * GROUP_M
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP_M)
    m = (first_tile + program % per_group % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % per_group // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_rows, in_columns = m < rows, n < columns
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_ptrs = w_ptr + n.to(tl.int64)[None, :] * depth + k[:, None]
    x_scale_ptrs = x_scale_ptr + m.to(tl.int64) * groups
    w_scale_ptrs = w_scale_ptr + n * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=in_rows[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=in_columns[None, :], other=0.0)
        else:
            in_depth = start + k < depth
            x = tl.load(x_ptrs, mask=in_rows[:, None] & in_depth[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=in_columns[None, :] & in_depth[:, None], other=0.0)
        if WIDTH > 0:
            group = start // WIDTH
            x_scale = tl.load(x_scale_ptrs + group, mask=in_rows, other=0.0)
            w_scale = tl.load(w_scale_ptrs + group, mask=in_columns, other=0.0)
            total += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        else:
            total = tl.dot(x, w, total, max_num_imprecise_acc=BLOCK_K)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if WIDTH == 0:
        total *= tl.load(x_scale_ptrs, mask=in_rows, other=0.0)[:, None]
        total *= tl.load(w_scale_ptrs, mask=in_columns, other=0.0)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_sums(sums, row_scale, column_scale):
    """Fp32 sums by both scales, one after the other."""
    sums *= row_scale
    sums *= column_scale
    return sums


@triton.jit
def _apply_scales_kernel(
    sums_ptr, x_scale_ptr, w_scale_ptr, out_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    sums = tl.load(sums_ptr + row * columns + column, mask=mask, other=0.0)
    column_scale = tl.load(w_scale_ptr + column, mask=mask, other=0.0)
    sums = scaled_sums(sums, tl.load(x_scale_ptr + row), column_scale)
    tl.store(out_ptr + row * columns + column, sums.to(out_ptr.dtype.element_ty), mask=mask)


def apply_scales(product: Sums, dtype: torch.dtype) -> Tensor:
    """The product by its scales, ``[rows, n]``, rounded to ``dtype`` once."""
    sums, scale, weight_scale = product
    (rows, columns), pdl = sums.shape, uses_pdl(sums.device)
    out = torch.empty(rows, columns, dtype=dtype, device=sums.device)
    _apply_scales_kernel[(rows, triton.cdiv(columns, SCALE_BLOCK))](
        sums, scale, weight_scale, out, columns, BLOCK=SCALE_BLOCK, PDL=pdl,
        num_warps=SCALE_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def takes(columns: int, groups: int) -> bool:
    """Whether :func:`multiply` knows products of ``columns`` with ``groups`` scales a row."""
    width = columns // groups
    return groups == 1 or width % DEPTH == 0 or (width >= LEAST_DEPTH and DEPTH % width == 0)


def library_takes(weight: Tensor, groups: int, dtype: torch.dtype) -> bool:
    """Whether cuBLAS multiplies by a weight on a GPU, e4m3 ``[n, k]``, with results of a dtype."""
    fits = all(size % 16 == 0 for size in weight.shape) and weight.is_contiguous()
    return groups == 1 and dtype == torch.bfloat16 and fits and _has_scales_by_row(weight.device)


@functools.cache
def _has_scales_by_row(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def shared_bytes(tile: Tile) -> int:
    """What a program takes of shared memory at most."""
    stage = (tile.m + tile.n) * (tile.k + 4)  # and scales
    return max((loop_buffers(tile.num_stages) + 1) * stage, tile.m * (tile.n + 8) * 4)


@functools.cache
def tile_of(rows: int | None, width: int, limit: int) -> Tile:
    """The tile for ``rows``, None where it may not depend on them, on a device whose blocks
    have ``limit`` bytes of shared memory. ``width``: columns that share a scale, 0 for all."""
    tile = FEW_ROWS if rows is None or rows <= FEW_ROWS.m else MANY_ROWS
    if width:
        tile = tile._replace(k=min(DEPTH, width))
    return first_that_fits((tile, *_smaller(tile)), lambda each: shared_bytes(each), limit)


def multiply(
    numbers: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    *,
    by_row: bool = False,
    tile: Tile | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """``(numbers * scale) @ (weight * weight_scale).T``.

    Args:
        numbers: e4m3 ``[..., k]``.
        scale: fp32 ``[..., groups]``.
        weight: e4m3 ``[n, k]``, contiguous.
        weight_scale: fp32 ``[n, groups]``; see :func:`takes`.
        dtype: of the result, a float.
        by_row: a row's bits depend on it alone, not on how many there are.
        tile: of the Triton kernel, which then multiplies; by default the one of these sizes.
        unit: fp32 1, of the device, with which cuBLAS may add few results up without scales.

    Returns:
        ``[..., n]``; sums are rounded once.
    """
    (columns, depth), groups = weight.shape, weight_scale.shape[1]
    flat, scales = numbers.reshape(-1, depth).contiguous(), scale.reshape(-1, groups).contiguous()
    rows = len(flat)
    shape = (*numbers.shape[:-1], columns)
    if not rows:
        return torch.empty(shape, dtype=dtype, device=numbers.device)
    if tile is None and not by_row and library_takes(weight, groups, dtype):
        by_unit = unit if has_few_results(rows, columns) else None
        out = multiply_by_library(flat, scales, weight, weight_scale, dtype, unit=by_unit)
        return out.view(shape)
    out = torch.empty(rows, columns, dtype=dtype, device=numbers.device)
    width = 0 if groups == 1 else depth // groups
    if tile is None:
        few = rows if rows <= FEW_ROWS.m else FEW_ROWS.m + 1
        tile = tile_of(None if by_row else few, width, block_limit(numbers.device))

    def launch(tile: Tile) -> None:
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)
        _scaled_kernel[grid](
            flat, scales, weight, weight_scale, out, rows, columns, depth, groups,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, WIDTH=width,
            EVEN_K=depth % tile.k == 0, GROUP_M=GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    launch_fitting("product of e4m3", tile, _smaller, launch)
    return out.view(shape)


def multiply_by_library(
    numbers: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    *,
    unit: Tensor | None,
) -> Tensor:
    """:func:`multiply` of ``numbers [rows, k]`` with scales by row, by cuBLAS; with a ``unit`` a
    kernel multiplies the sums (:func:`sums_by_library`) by both scales."""
    if unit is not None:
        return apply_scales(sums_by_library(numbers, scale, weight, weight_scale, unit), dtype)
    return torch._scaled_mm(
        numbers, weight.t(), scale, weight_scale.t(), out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )  # fmt: skip


def has_few_results(rows: int, columns: int) -> bool:
    """Whether cuBLAS is quicker where it adds up without scales."""
    return rows <= ONE_SCALE_ROWS and rows * columns <= ONE_SCALE_RESULTS


def sums_by_library(
    numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, unit: Tensor
) -> Sums:
    """Products of ``numbers [rows, k]`` added up as they are, in fp32, by cuBLAS."""
    sums = torch._scaled_mm(
        numbers, weight.t(), unit, unit, out_dtype=torch.float32, use_fast_accum=FAST_ACCUMULATION
    )
    return Sums(sums, scale, weight_scale)


def _smaller(tile: Tile) -> Iterator[Tile]:
    """Tiles of fewer stages, which keep the order of sums."""
    yield from (tile._replace(num_stages=n) for n in range(tile.num_stages - 1, 0, -1))
