"""Triton GEMM whose rows are independent of each other, whatever their number.

The sum over K runs in one program, in order, in float32, by one kind of instruction. So row m of
the result is one function of row m of the input. Without :func:`find_tiles` the tile depends on
dtype and N alone. With it the tile depends on M, too: only tiles are taken then that have given the
first one's bits on this device.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
import logging
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

logger = logging.getLogger(__name__)


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
HALF_TILES = (
    Tile(128, 256, 64, num_warps=8, num_stages=4),
    Tile(128, 128, 64, num_warps=8, num_stages=4),
    Tile(64, 128, 64, num_warps=4, num_stages=5),
    HALF_TILE,
    HALF_TILE_NARROW,
)
"""From the largest on; rows of a product, and columns, read each other's operands less often."""
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


_same: dict[tuple[torch.device, torch.dtype], tuple[Tile, ...]] = {}
"""Tiles of a device that have the bits of ``HALF_TILE`` there."""


def find_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """Look once which of :data:`HALF_TILES` have the same bits on a GPU; products on it take any of
    them from now on. This compiles, and waits for the device."""
    if (device, dtype) in _same or dtype is torch.float32:
        return
    generator = torch.Generator(device).manual_seed(0)

    def values(*shape: int) -> Tensor:
        """Random numbers of many sizes, so that sums are rounded at each step."""
        sizes = torch.randint(-6, 7, shape, generator=generator, device=device)
        return (torch.randn(shape, generator=generator, device=device) * 2.0**sizes).to(dtype)

    a, b, limit = values(128, 1024), values(256, 1024).t(), block_limit(device)
    expected = _product(a, b, None, HALF_TILE)
    same = []
    for tile in HALF_TILES:
        if shared_bytes(tile, dtype.itemsize, limit) > limit:
            continue
        if tile == HALF_TILE or torch.equal(_product(a, b, None, tile), expected):
            same.append(tile)
        else:
            logger.warning("%s has other bits than %s on this GPU: it is not used", tile, HALF_TILE)
    _same[device, dtype] = tuple(same)


def _tile(device: torch.device, dtype: torch.dtype, rows: int, columns: int, count: int) -> Tile:
    """The largest tile that gives 7 of 8 multiprocessors work, for ``count`` products."""
    same = _same.get((device, dtype), ())
    for tile in same:
        tiles = count * triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n)
        is_enough = 8 * tiles >= 7 * _multiprocessors(device) or tile == same[-1]
        if is_enough and (tile.m <= 64 or rows > 64):
            return tile
    return tile_of(dtype, columns, block_limit(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    total = _sum(
        a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    is_one = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_one)


@triton.jit
def _grouped_kernel(
    a_ptr, b_ptr, ends_ptr, out_ptr, groups, columns, depth, b_g, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUPS_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the rows of one group times its matrix. A group's tiles begin at its first row //
    BLOCK_M + its index, which leaves room for the ragged tiles of all groups before it."""
    tile = tl.program_id(0)
    index = tl.arange(0, GROUPS_PAD)
    is_later = (index > 0) & (index < groups)
    begins = tl.load(ends_ptr + index - 1, mask=is_later, other=0)
    is_before = (begins // BLOCK_M + index <= tile) & (index < groups)
    group = tl.sum(is_before.to(tl.int32), 0) - 1
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    begin += (tile - begin // BLOCK_M - group) * BLOCK_M
    if begin >= end:
        return
    m = begin + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _sum(
        a_ptr, b_ptr + group.to(tl.int64) * b_g, m, n, end, columns, depth, b_k, b_n, BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN_K, PRECISION,
    )  # fmt: skip
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    is_one = (m < end)[:, None] & (n < columns)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_one)


@triton.jit
def _sum(
    a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows m of ``a`` times columns n of ``b``, in the order of K; those that are not there are
    0."""
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
    return total


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
    tile = _tile(a.device, a.dtype, flat.shape[0], columns, 1)
    return _product(flat, b, bias, tile).view(*a.shape[:-1], columns)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """``[rows, columns]``"""
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out

    def launch(tile: Tile) -> None:
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)
        _matmul_kernel[grid](
            a, b, b if bias is None else bias, out, rows, columns, depth, b.stride(0),
            b.stride(1), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            EVEN_K=depth % tile.k == 0, HAS_BIAS=bias is not None,
            PRECISION="ieee" if a.dtype is torch.float32 else "tf32", GROUP_M=GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    launch_fitting("batch-invariant product", tile, smaller, launch)
    return out


def matmul_by_group(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows ``[T, K]`` in groups times ``[G, K, N]`` of any strides, a matrix for each group;
    ``ends`` int32 ``[G]`` are the rows behind the groups, which follow each other. A row has the
    bits of :func:`matmul_by_row`; those behind the last group are 0. Returns ``[T, N]``.

    Raises:
        ValueError: dtypes or shapes do not fit.
    """
    (rows, depth), (groups, _, columns) = a.shape, b.shape
    if depth != b.shape[1] or ends.shape != (groups,) or ends.dtype is not torch.int32:
        raise ValueError(
            f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)} in groups that end at "
            f"{ends.dtype} {tuple(ends.shape)}"
        )
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise ValueError(f"a product of {a.dtype} by {b.dtype}: use one of {DTYPES} for both")
    a, ends = a.contiguous(), ends.contiguous()
    out = torch.zeros((rows, columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0 or groups == 0:
        return out

    def launch(tile: Tile) -> None:
        grid = (rows // tile.m + groups, triton.cdiv(columns, tile.n))
        _grouped_kernel[grid](
            a, b, ends, out, groups, columns, depth, b.stride(0), b.stride(1), b.stride(2),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, EVEN_K=depth % tile.k == 0,
            GROUPS_PAD=triton.next_power_of_2(groups),
            PRECISION="ieee" if a.dtype is torch.float32 else "tf32",
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    tile = _tile(a.device, a.dtype, -(-rows // groups), columns, groups)
    launch_fitting("batch-invariant product of groups", tile, smaller, launch)
    return out
