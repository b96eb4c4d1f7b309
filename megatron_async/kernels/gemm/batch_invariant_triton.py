"""Triton GEMM whose rows are independent of each other, whatever their number.

The tile and the instruction depend on dtype, N and K alone, never on M; the sum over K runs in one
program, in order, in float32. So row m of the result is one function of row m of the input.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.shared_memory import (
    HOPPER_BYTES,
    block_limit,
    first_that_fits,
    has_async_products,
    loop_buffers,
)


class Tile(NamedTuple):
    """Shape of a program's work and how it is compiled."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


NARROW = 2048
"""GEMMs with no more columns get narrow tiles, so that more programs share the reading."""
GROUP_M = 16
"""Tiles of rows that run together with the same columns, which they share in the L2 cache."""
HALF_TILE = Tile(64, 64, 128, num_warps=4, num_stages=4)
HALF_TILE_NARROW = Tile(64, 32, 128, num_warps=4, num_stages=4)
FLOAT_TILE = Tile(32, 32, 32, num_warps=4, num_stages=3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def shared_bytes(tile: Tile, element_size: int, limit: int) -> int:
    """What a program takes of shared memory at most on a device with such a limit."""
    stage = (tile.m + tile.n) * tile.k * element_size
    buffers = loop_buffers(tile.num_stages)
    if element_size == 2 and has_async_products(limit) and tile.num_stages > 1:
        buffers += 1
    return max(buffers * stage, tile.m * (tile.n + 8) * element_size)


def smaller(tile: Tile) -> Iterator[Tile]:
    """Tiles that take less: of fewer stages, then of fewer columns of K."""
    k = tile.k
    while k >= 16:
        yield from (tile._replace(k=k, num_stages=n) for n in range(tile.num_stages, 0, -1))
        k //= 2


@functools.cache
def tile_of(dtype: torch.dtype, columns: int, limit: int = HOPPER_BYTES) -> Tile:
    """The tile of a GEMM with ``columns`` columns on a device with such a limit of shared memory;
    the number of rows must not be asked for."""
    tile = HALF_TILE_NARROW if columns <= NARROW else HALF_TILE
    if dtype is torch.float32:
        tile = FLOAT_TILE
    return first_that_fits(
        itertools.chain((tile,), smaller(tile)),
        lambda each: shared_bytes(each, dtype.itemsize, limit),
        limit,
    )


# Rows must not steer specialisation: one compiled kernel serves every M.
@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, rows, columns, depth, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first_tile = program // per_group * GROUP_M
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP_M)
    m = (first_tile + program % per_group % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % per_group // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_rows = (m < rows)[:, None]
    in_columns = (n < columns)[None, :]
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    b_ptrs = b_ptr + k[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_rows, other=0.0)
            b = tl.load(b_ptrs, mask=in_columns, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=in_rows & (start + k < depth)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=in_columns & (start + k < depth)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * b_k
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_rows & in_columns)


def matmul_by_row(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` for a ``[..., K]``, b ``[K, N]`` of any strides and bias ``[N]``.

    bfloat16, float16 or float32, all of one dtype; float32 is multiplied exactly, never as TF32.
    Returns ``[..., N]``; the bias is added in float32, before rounding.

    Raises:
        ValueError: dtypes or shapes do not fit.
    """
    depth, columns = b.shape
    if a.shape[-1] != depth:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    if a.dtype not in DTYPES or b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        raise ValueError(
            f"a product of {a.dtype} by {b.dtype} with bias "
            f"{None if bias is None else bias.dtype}: use one of {DTYPES} for all"
        )
    if bias is not None and (bias.shape != (columns,) or bias.stride(0) != 1):
        bias = bias.expand(columns).contiguous()
    flat = a.reshape(-1, depth).contiguous()
    rows = flat.shape[0]
    out = torch.empty((*a.shape[:-1], columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out

    def launch(tile: Tile) -> None:
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)
        _matmul_kernel[grid](
            flat, b, b if bias is None else bias, out, rows, columns, depth, b.stride(0),
            b.stride(1), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            EVEN_K=depth % tile.k == 0, HAS_BIAS=bias is not None,
            PRECISION="ieee" if a.dtype is torch.float32 else "tf32", GROUP_M=GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    tile = tile_of(a.dtype, columns, block_limit(a.device))
    launch_fitting("batch-invariant product", tile, smaller, launch)
    return out
