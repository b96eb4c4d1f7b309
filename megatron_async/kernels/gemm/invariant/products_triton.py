"""Triton GEMM whose rows are independent of each other, whatever their number.

The sum over K has one order, in float32, by one kind of instruction: N and K alone divide K into
segments (:func:`segments_of`), each is added up from 0 on, and then their sums are, one after the
other. One program has all segments, or each has a program of its own where there are few rows, and
a second kernel adds up; that makes no difference to a bit. So row m of the result is one function
of row m of the input. Without :func:`find_tiles` the tile depends on dtype and N alone. With it the
tile depends on M, too: only tiles are taken then that have given the first one's bits on this
device.

Launched early (``kernels/pdl.py``), a program has its first weights come into the L2 cache before
it waits for the kernel in front.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.gemm.invariant import skinny
from megatron_async.kernels.gemm.invariant.segments import segment_size, segments_of
from megatron_async.kernels.gemm.invariant.sums_triton import (
    join_kernel,
    prefetch,
    sum_in_order,
    sum_of_segments,
)
from megatron_async.kernels.gemm.invariant.wide_triton import (
    BLOCK_M,
    REFUSALS,
    takes,
    tiles,
    wide_gated_product,
    wide_product,
)
from megatron_async.kernels.pdl import pdl_enter, uses_pdl
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
    Tile(128, 64, 64, num_warps=8, num_stages=4),
    Tile(64, 128, 64, num_warps=4, num_stages=4),
    Tile(64, 64, 64, num_warps=4, num_stages=6),
    HALF_TILE,
    HALF_TILE_NARROW,
)
"""From the largest on; rows of a product, and columns, read each other's operands less often. Of
those of 64 rows and 64 columns of K two programs share a multiprocessor."""
WIDEST_SUM = 128 * 128
"""Numbers of a tile beside which a program has registers for the sum of the segments before."""
MOST_SPLIT = 512
"""Rows of a product whose segments may have programs of their own."""
JOINED = 1024
"""Numbers of a program that adds up segments."""
PREFETCHED = 64 * 1024
"""Bytes of weights that a program asks for before it waits for the kernel in front."""
PREFETCH_ROWS = 256
"""With more rows a program is not there before its multiprocessor has been at work."""
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
_wide: set[tuple[torch.device, torch.dtype]] = set()
"""Where the widest tiles have these bits, too."""
_wide_gated: set[tuple[torch.device, torch.dtype]] = set()
"""And where they have those of SwiGLU behind a product."""


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
    expected = product(a, b, None, HALF_TILE)
    same = []
    for tile in HALF_TILES:
        if shared_bytes(tile, dtype.itemsize, limit) > limit:
            continue
        if tile == HALF_TILE or torch.equal(product(a, b, None, tile), expected):
            same.append(tile)
        else:
            logger.warning("%s has other bits than %s on this GPU: it is not used", tile, HALF_TILE)
    _same[device, dtype] = tuple(same)
    if has_async_products(limit) and _is_wide_same(values):
        _wide.add((device, dtype))
        if _is_wide_gated_same(values):
            _wide_gated.add((device, dtype))
    if dtype is torch.bfloat16:
        other = skinny.find_products(device, values, _expected_of_few)
        if other is not None:
            logger.warning("kernels in CUDA for few rows are not used on this GPU: %s", other)


def _is_wide_same(values: Callable[..., Tensor]) -> bool:
    """Whether products of the widest tiles have the bits of others, with one segment of K and with
    several, over several tiles of a program."""
    for depth in (1024, 8192):
        a, b = values(300, depth), values(520, depth).t()
        segments = segments_of(a.dtype, 520, depth)
        try:
            wide = wide_product(a, b, None, segments, segment_size(depth, segments), 2)
        except REFUSALS as error:
            logger.warning("products by TMA do not run on this GPU: %s", error)
            return False
        if not torch.equal(wide, product(a, b, None, HALF_TILE)):
            logger.warning("products by TMA have other bits on this GPU: they are not used")
            return False
    return True


def _is_wide_gated_same(values: Callable[..., Tensor]) -> bool:
    """Whether SwiGLU in products of the widest tiles has the bits of one behind them."""
    from megatron_async.kernels.norm.swiglu import swiglu

    a, b = values(300, 1024) / 4096, values(520, 1024).t()
    try:
        wide = wide_gated_product(a, b, 2)
    except REFUSALS as error:
        logger.warning("products by TMA with SwiGLU do not run on this GPU: %s", error)
        return False
    if not torch.equal(wide, swiglu(product(a, b, None, HALF_TILE))):
        logger.warning("SwiGLU in products by TMA has other bits on this GPU: it is not used")
        return False
    return True


def _expected_of_few(x: Tensor, weight: Tensor, asked: skinny.Product) -> Tensor:
    from megatron_async.kernels.norm.swiglu import swiglu

    found = product(x, weight.t(), None, HALF_TILE)
    return swiglu(found) if asked.gated else found


def choose_tile(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, count: int, segments: int = 1
) -> tuple[Tile, bool]:
    """The largest tile that gives 2 of 3 multiprocessors work, for ``count`` products, and whether
    each segment has a program of its own."""
    same = _same.get((device, dtype), ())
    may_split = segments > 1 and count == 1 and rows <= MOST_SPLIT
    for tile in same:
        if tile.m > 64 and rows <= 64:
            continue
        enough = 2 * multiprocessors(device)
        tiles = 3 * count * triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n)
        holds = segments == 1 or tile.m * tile.n <= WIDEST_SUM
        if tiles >= enough and holds:
            return tile, False
        if may_split and segments * tiles >= enough:
            return tile, True
        if tile == same[-1]:
            return tile, may_split
    return tile_of(dtype, columns, block_limit(device)), False


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Rows must not steer specialisation: one compiled kernel serves every M.
@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, partial_ptr, rows, columns, depth, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first_tile = program // per_group * GROUP_M
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP_M)
    m = (first_tile + program % per_group % side_by_side) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % per_group // side_by_side * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.program_id(1)
    if LINES > 0:
        prefetch(b_ptr, n, segment * SEGMENT, columns, depth, b_n, LINES)
    pdl_enter(PDL)
    out_at = m.to(tl.int64)[:, None] * columns + n[None, :]
    is_one = (m < rows)[:, None] & (n < columns)[None, :]
    if SPLIT:
        total = sum_in_order(
            a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, segment * SEGMENT,
            tl.minimum(segment * SEGMENT + SEGMENT, depth), BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            PRECISION,
        )  # fmt: skip
        partial_ptr += segment.to(tl.int64) * rows * columns
        tl.store(partial_ptr + out_at, total, mask=is_one)
    else:
        total = sum_of_segments(
            a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            PRECISION, SEGMENTS, SEGMENT,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + n, mask=n < columns, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=is_one)


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
    segments, rows = segments_of(a.dtype, columns, depth), flat.shape[0]
    if is_wide(flat, b):
        size, most = segment_size(depth, segments), multiprocessors(a.device)
        out = wide_product(flat, b, bias, segments, size, most)
        return out.view(*a.shape[:-1], columns)
    of_few = skinny.multiply(flat, b.t(), segments, bias)
    if of_few is not None:
        return of_few.view(*a.shape[:-1], columns)
    tile, split = choose_tile(a.device, a.dtype, rows, columns, 1, segments)
    return product(flat, b, bias, tile, split).view(*a.shape[:-1], columns)


def segments_by_row(a: Tensor, b: Tensor) -> Tensor | None:
    """The segments that :func:`matmul_by_row` would add up, fp32 ``[segments, ..., N]``; None where
    no kernel would leave them. ``a`` has rows."""
    (depth, columns), flat = b.shape, a.reshape(-1, b.shape[0]).contiguous()
    segments = segments_of(a.dtype, columns, depth)
    if segments == 1 or is_wide(flat, b) or skinny.takes(flat, b.t(), segments):
        return None
    tile, split = choose_tile(a.device, a.dtype, flat.shape[0], columns, 1, segments)
    if not split:
        return None
    shape = (segments, *a.shape[:-1], columns)
    return product(flat, b, None, tile, split=True, joined=False).view(shape)


def lines_ahead(a: Tensor, b: Tensor, tile: Tile) -> int:
    """Lines of each column of ``b`` that a program asks for ahead, for ``a`` ``[rows, K]``."""
    follow = a.element_size() == 2 and b.stride(0) == 1
    if not uses_pdl(a.device) or not follow or a.shape[0] > PREFETCH_ROWS:
        return 0
    return max(1, PREFETCHED // (128 * tile.n))


def is_wide(a: Tensor, b: Tensor, *, gated: bool = False) -> bool:
    """Whether a contiguous ``[rows, K]`` by ``b`` has the widest tiles, 5 for 6 multiprocessors or
    more; with ``gated`` whether these have SwiGLU, too."""
    rows = a.shape[0]
    return (
        (a.device, a.dtype) in (_wide_gated if gated else _wide)
        and rows > BLOCK_M
        and 6 * tiles(rows, b.shape[1]) >= 5 * multiprocessors(a.device)
        and takes(a, b)
    )


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    tile: Tile,
    split: bool = False,
    *,
    joined: bool = True,
) -> Tensor:
    """:func:`matmul_by_row` of a contiguous ``[rows, K]`` with a given tile; ``split`` gives each
    segment of K a program of its own, where there are several. Those that are not ``joined`` are
    returned, fp32 ``[segments, rows, columns]``."""
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    segments, pdl = segments_of(a.dtype, columns, depth), uses_pdl(a.device)
    split = split and segments > 1
    partial = out
    if split:
        partial = torch.empty((segments, rows, columns), dtype=torch.float32, device=a.device)

    def launch(tile: Tile) -> None:
        grid = (
            triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n), segments if split else 1,
        )  # fmt: skip
        _matmul_kernel[grid](
            a, b, b if bias is None else bias, out, partial, rows, columns, depth, b.stride(0),
            b.stride(1), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            EVEN_K=depth % tile.k == 0, HAS_BIAS=bias is not None and not split,
            PRECISION="ieee" if a.dtype is torch.float32 else "tf32", GROUP_M=GROUP_M,
            SEGMENTS=segments, SEGMENT=segment_size(depth, segments), SPLIT=split, PDL=pdl,
            LINES=lines_ahead(a, b, tile),
            num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip

    launch_fitting("batch-invariant product", tile, smaller, launch)
    if not joined:
        return partial
    if split:
        join_kernel[(triton.cdiv(out.numel(), JOINED),)](
            partial, b if bias is None else bias, out, out.numel(), columns, SEGMENTS=segments,
            BLOCK=JOINED, HAS_BIAS=bias is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
