"""SwiGLU of a product in one order of K, with the bits of ``norm/swiglu.py`` behind
``products_triton.matmul_by_row``.

A program has columns of the gate and those of the other half that they meet. Both are rounded as
the product is, so what is not written and read again are twice the columns of the result.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.gemm.invariant import skinny
from megatron_async.kernels.gemm.invariant.products_triton import (
    GROUP_M,
    Tile,
    choose_tile,
    is_wide,
    lines_ahead,
    matmul_by_row,
    multiprocessors,
    segments_of,
    smaller,
)
from megatron_async.kernels.gemm.invariant.sums_triton import prefetch
from megatron_async.kernels.gemm.invariant.wide_triton import wide_gated_product
from megatron_async.kernels.norm.swiglu import gated, swiglu
from megatron_async.kernels.pdl import pdl_enter, uses_pdl


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    a_ptr, b_ptr, out_ptr, rows, columns, depth, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of each half."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first_tile = program // per_group * GROUP_M
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP_M)
    m = (first_tile + program % per_group % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % per_group // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    if LINES > 0:
        prefetch(b_ptr, n, 0, 2 * columns, depth, b_n, LINES)
        prefetch(b_ptr, n + columns, 0, 2 * columns, depth, b_n, LINES)
    pdl_enter(PDL)
    k = tl.arange(0, BLOCK_K)
    in_rows = (m < rows)[:, None]
    in_columns = (n < columns)[None, :]
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    gate_ptrs = b_ptr + k.to(tl.int64)[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    up_ptrs = b_ptr + k.to(tl.int64)[:, None] * b_k + (n + columns).to(tl.int64)[None, :] * b_n
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        in_k = start + k < depth
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_rows, other=0.0)
            gate_b = tl.load(gate_ptrs, mask=in_columns, other=0.0)
            up_b = tl.load(up_ptrs, mask=in_columns, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=in_rows & in_k[None, :], other=0.0)
            gate_b = tl.load(gate_ptrs, mask=in_columns & in_k[:, None], other=0.0)
            up_b = tl.load(up_ptrs, mask=in_columns & in_k[:, None], other=0.0)
        gate = tl.dot(a, gate_b, gate)
        up = tl.dot(a, up_b, up)
        a_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K * b_k
        up_ptrs += BLOCK_K * b_k
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))
    out_at = m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out_ptr + out_at, out.to(dtype), mask=in_rows & in_columns)


def takes_gated(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`gated_by_row` takes these: numbers of 16 bits, and K in one segment."""
    depth, columns = b.shape
    return (
        a.dtype in (torch.bfloat16, torch.float16)
        and a.dtype == b.dtype
        and columns % 2 == 0
        and a.numel() > 0
        and segments_of(a.dtype, columns, depth) == 1
    )


def gated_by_row(a: Tensor, b: Tensor) -> Tensor:
    """``swiglu(matmul_by_row(a, b))`` for a ``[..., K]`` and b ``[K, 2 F]`` that
    :func:`takes_gated` takes: ``[..., F]``."""
    depth, columns = b.shape[0], b.shape[1] // 2
    flat = a.reshape(-1, depth).contiguous()
    if is_wide(flat, b):
        if not is_wide(flat, b, gated=True):
            return swiglu(matmul_by_row(a, b))
        out = wide_gated_product(flat, b, multiprocessors(a.device))
        return out.view(*a.shape[:-1], columns)
    rows, pdl = flat.shape[0], uses_pdl(a.device)
    of_few = skinny.multiply(flat, b.t(), 1, gated=True)
    if of_few is not None:
        return of_few.view(*a.shape[:-1], columns)
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)

    def launch(tile: Tile) -> None:
        half = tile.n // 2
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, half),)
        _gated_kernel[grid](
            flat, b, out, rows, columns, depth, b.stride(0), b.stride(1), BLOCK_M=tile.m,
            BLOCK_N=half, BLOCK_K=tile.k, EVEN_K=depth % tile.k == 0, GROUP_M=GROUP_M, PDL=pdl,
            LINES=lines_ahead(flat, b, tile), num_warps=tile.num_warps,
            num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip

    tile, _ = choose_tile(a.device, a.dtype, rows, 2 * columns, 1)
    launch_fitting("batch-invariant product with SwiGLU", tile, smaller, launch)
    return out.view(*a.shape[:-1], columns)
