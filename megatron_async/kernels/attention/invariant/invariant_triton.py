"""Triton kernels of paged attention with one order of summation: a token's output has the same bits
as a decode row and in a chunk, with any chunk's borders and any neighbours.

Keys go in tiles, tiles into splits, splits into the output, each in the order of the sequence.
Which splits a token has depends on its own position alone. Both kernels call the same functions on
tiles of the same shape, so their products and reductions have the same layouts; a tile of decode
heads is padded to the rows of a chunk's tile. What a token does not see changes none of its sums:
weights are 0 there. Products and sums are fused where ``tl.fma`` says so and nowhere else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.invariant.splits_triton import (
    add_split,
    begin_splits,
    first_token,
    scales,
    split_size,
)
from megatron_async.kernels.attention.paged_decode_triton import IN_LOG2, LOG2_E, MOST_ROWS
from megatron_async.kernels.attention.paged_prefill_triton import (
    FIRST,
    LENGTH,
    LOWEST,
    NO_CHUNK,
    SLOT,
    START,
    WIDTH,
    attend_tile,
)
from megatron_async.kernels.attention.tiles import Heads, PrefillTile, fewer_stages, invariant_tile
from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.pdl import pdl_enter, uses_pdl
from megatron_async.kernels.shared_memory import block_limit

MIN_SPLIT = 1024
"""Tokens of a split; longer sequences take a multiple of it so that they have at most MAX_SPLITS,
or one more with a window."""
MAX_SPLITS = 32


@triton.jit
def _rows_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, slots_ptr, length_ptr, partial_ptr, stats_ptr,
    sinks_ptr, out_ptr,
    query_row, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    table_row, capacity, splits, scale, window,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SHARES: tl.constexpr,
    PDL: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One split of one row for GROUP heads: its sum, maximum and mass; or ALONE the row's output,
    which has no other split."""
    pdl_enter(PDL)
    part = tl.program_id(0)
    kv_head = part // SHARES
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + row).to(tl.int32), capacity)
    size = split_size(length, window, MIN_SPLIT, MAX_SPLITS, WINDOW)
    begin = first_token(length, size, window, WINDOW) + split * size
    if not ALONE:  # noqa: SIM102 (decided when it is compiled)
        if begin >= length:
            return
    end = tl.minimum(begin + size, length)
    if WINDOW:
        begin = tl.maximum(begin, (length - window) // TILE * TILE)

    member = tl.arange(0, ROWS)
    head = part * GROUP + member
    d = tl.arange(0, D_PAD)
    is_row = (member < GROUP)[:, None]
    if D != D_PAD:
        is_row = is_row & (d < D)[None, :]
    query_at = row * query_row + (head * query_head)[:, None] + d[None, :]
    query = tl.load(query_ptr + query_at, mask=is_row, other=0.0)
    table_ptr += tl.load(slots_ptr + row).to(tl.int64) * table_row
    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head
    position = member * 0 + (length - 1)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for start in range(begin, end, TILE):
        highest, mass, total = attend_tile(
            start, query, query, position, end, highest, mass, total, key_ptr, value_ptr,
            table_ptr, key_block, key_token, value_block, value_token, scale, window,
            True, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP, False, 0, 16,
        )  # fmt: skip
    at = (row * (tl.num_programs(0) * GROUP) + head) * splits + split
    if ALONE:
        sink = tl.zeros([ROWS], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0).to(tl.float32)
            sink *= IN_LOG2
        first, first_mass = begin_splits(sink, SINKS)
        nothing = tl.zeros([ROWS, D_PAD], tl.float32)
        highest, mass, total = add_split(
            first, first_mass, nothing, highest, mass, total, ROWS, D_PAD
        )
        out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * D + d[None, :], out, mask=is_row)
    else:
        tl.store(partial_ptr + at[:, None] * D + d[None, :], total, mask=is_row)
        tl.store(stats_ptr + at * 2, highest, mask=member < GROUP)
        tl.store(stats_ptr + at * 2 + 1, mass, mask=member < GROUP)


@triton.jit
def _join_kernel(
    partial_ptr, stats_ptr, length_ptr, sinks_ptr, out_ptr, capacity, splits, window,
    D: tl.constexpr, D_PAD: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The splits of one head of one row, one after the other."""
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.minimum(tl.load(length_ptr + row).to(tl.int32), capacity)
    size = split_size(length, window, MIN_SPLIT, MAX_SPLITS, WINDOW)
    count = tl.cdiv(length - first_token(length, size, window, WINDOW), size)
    sink = tl.full((), 0.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + tl.program_id(1)).to(tl.float32) * IN_LOG2
    highest, mass = begin_splits(sink, SINKS)
    d = tl.arange(0, D_PAD)
    total = tl.zeros([D_PAD], tl.float32)
    for split in range(0, count):
        place = at * splits + split
        highest, before, here = scales(highest, tl.load(stats_ptr + place * 2))
        mass = tl.fma(tl.load(stats_ptr + place * 2 + 1), here, mass * before)
        part = tl.load(partial_ptr + place * D + d, mask=d < D, other=0.0)
        total = tl.fma(part, tl.zeros_like(part) + here, total * before)
    tl.store(out_ptr + at * D + d, (total / mass).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _chunks_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, chunks_ptr, sinks_ptr, out_ptr, chunk_count,
    query_row, query_head, out_row, out_head, key_block, key_token, key_head,
    value_block, value_token, value_head, table_row, scale, window,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, CHUNKS_PAD: tl.constexpr, PRECISION: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one chunk, for GROUP heads, see ``paged_prefill_triton``."""
    pdl_enter(PDL)
    TOKENS: tl.constexpr = ROWS // GROUP
    part = tl.program_id(0)
    kv_head = part // SHARES
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    index = tl.arange(0, CHUNKS_PAD)
    first_ptr = chunks_ptr + index * WIDTH + FIRST
    firsts = tl.load(first_ptr, mask=index < chunk_count, other=NO_CHUNK)
    chunk = tl.sum((firsts // TOKENS + index <= tile).to(tl.int32), 0) - 1
    if chunk < 0:
        return
    chunks_ptr += chunk * WIDTH
    first = tl.load(chunks_ptr + FIRST)
    offset = (tile - first // TOKENS - chunk) * TOKENS
    count = tl.minimum(tl.load(chunks_ptr + LENGTH) - offset, TOKENS)
    if count <= 0:
        return
    table_ptr += tl.load(chunks_ptr + SLOT).to(tl.int64) * table_row
    begin = tl.load(chunks_ptr + START) + offset
    end = begin + count

    row = tl.arange(0, ROWS)
    token = (first + offset + row // GROUP).to(tl.int64)
    head = part * GROUP + row % GROUP
    position = begin + row // GROUP
    d = tl.arange(0, D_PAD)
    is_row = (row < count * GROUP)[:, None]
    if D != D_PAD:
        is_row = is_row & (d < D)[None, :]
    query_at = (token * query_row + head * query_head)[:, None] + d[None, :]
    query = tl.load(query_ptr + query_at, mask=is_row, other=0.0)
    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head
    sink = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * IN_LOG2

    # All of the tokens see the tiles from ``whole`` to ``seen``.
    seen = (begin + 1) // TILE * TILE
    whole = 0
    if WINDOW:
        whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE) * TILE, seen)
    # Tokens of a tile may have splits of two sizes: those of each size once.
    row_size = split_size(position + 1, window, MIN_SPLIT, MAX_SPLITS, WINDOW)
    least = split_size(begin + 1, window, MIN_SPLIT, MAX_SPLITS, WINDOW)
    most = split_size(end, window, MIN_SPLIT, MAX_SPLITS, WINDOW)
    for size in range(least, most + 1, MIN_SPLIT):
        highest, mass = begin_splits(sink, SINKS)
        total = tl.zeros([ROWS, D_PAD], tl.float32)
        for split in range(first_token(begin + 1, size, window, WINDOW), end, size):
            split_end = tl.minimum(split + size, end)
            split_highest = tl.full([ROWS], LOWEST, tl.float32)
            split_mass = tl.zeros([ROWS], tl.float32)
            split_total = tl.zeros([ROWS, D_PAD], tl.float32)
            left = split
            if WINDOW:
                left = tl.maximum(split, tl.maximum(begin + 1 - window, 0) // TILE * TILE)
                to = tl.maximum(tl.minimum(whole, split_end), left)
                for start in range(left, to, TILE):
                    split_highest, split_mass, split_total = attend_tile(
                        start, query, query, position, end, split_highest, split_mass,
                        split_total, key_ptr, value_ptr, table_ptr, key_block, key_token,
                        value_block, value_token, scale, window,
                        True, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP,
                        False, 0, 16,
                    )  # fmt: skip
                left = to
            middle = tl.maximum(tl.minimum(seen, split_end), left)
            for start in range(left, middle, TILE):
                split_highest, split_mass, split_total = attend_tile(
                    start, query, query, position, end, split_highest, split_mass, split_total,
                    key_ptr, value_ptr, table_ptr, key_block, key_token, value_block,
                    value_token, scale, window,
                    False, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP, False, 0, 16,
                )  # fmt: skip
            for start in range(middle, split_end, TILE):
                split_highest, split_mass, split_total = attend_tile(
                    start, query, query, position, end, split_highest, split_mass, split_total,
                    key_ptr, value_ptr, table_ptr, key_block, key_token, value_block,
                    value_token, scale, window,
                    True, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP, False, 0, 16,
                )  # fmt: skip
            highest, mass, total = add_split(
                highest, mass, total, split_highest, split_mass, split_total, ROWS, D_PAD
            )
        out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        out_at = (token * out_row + head * out_head)[:, None] + d[None, :]
        tl.store(out_ptr + out_at, out, mask=is_row & (row_size == size)[:, None])


def invariant_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    slots: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``paged_decode.paged_decode_attention`` in the order of this module, for dtypes and sizes of
    heads that ``paged_attention.has_kernel`` knows. ``slots`` [R] int64 are rows of the table.

    Nothing waits for the device, and allocations depend on shapes alone.

    Raises:
        ValueError: the last dimension of a cache or of the table is strided.
    """
    rows, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    _check(key_cache, value_cache, block_table)
    query = query if query.stride(2) == 1 else query.contiguous()
    lengths, slots = lengths.contiguous(), slots.contiguous()
    out = query.new_empty(query.shape)
    capacity = block_table.shape[1] * block_size
    reach = capacity if window is None else min(capacity, window + MIN_SPLIT - 1)
    splits = min(MAX_SPLITS + (window is not None), triton.cdiv(reach, MIN_SPLIT))
    shape = Heads.of(query, kv_heads, None)
    tile = invariant_tile(shape, block_limit(query.device), rows=True)
    if not rows:
        return out
    if rows > MOST_ROWS:
        for first in range(0, rows, MOST_ROWS):
            some = slice(first, first + MOST_ROWS)
            out[some] = invariant_rows(
                query[some], key_cache, value_cache, block_table, lengths[some], scale,
                slots[some], window=window, soft_cap=soft_cap, sinks=sinks,
            )  # fmt: skip
        return out
    pdl = uses_pdl(query.device)
    partial = query.new_empty((rows, heads, splits, head_dim), dtype=torch.float32)
    stats = query.new_empty((rows, heads, splits, 2), dtype=torch.float32)

    def launch(tile: PrefillTile) -> None:
        _rows_kernel[(heads // tile.group, splits, rows)](
            query, key_cache, value_cache, block_table, slots, lengths, partial, stats,
            query if sinks is None else sinks, out,
            query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1),
            key_cache.stride(2), value_cache.stride(0), value_cache.stride(1),
            value_cache.stride(2), block_table.stride(0), capacity, splits, scale * LOG2_E,
            window or 0, SINKS=sinks is not None, ALONE=splits == 1, num_stages=tile.stages,
            **_common(shape, tile, query, window, soft_cap, block_size),
        )  # fmt: skip

    launch_fitting("attention of rows in one order", tile, fewer_stages, launch)
    if splits == 1:
        return out
    _join_kernel[(rows, heads)](
        partial, stats, lengths, stats if sinks is None else sinks, out, capacity, splits,
        window or 0, D=head_dim, D_PAD=shape.value_pad, MIN_SPLIT=MIN_SPLIT,
        MAX_SPLITS=MAX_SPLITS, WINDOW=window is not None, SINKS=sinks is not None,
        PDL=pdl, num_warps=2, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return out


def invariant_chunks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    chunks: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """``paged_prefill.paged_mixed_attention`` with the bits of :func:`invariant_rows`.

    Raises:
        ValueError: the last dimension of a cache, table or ``out``, or the chunk table is strided.
    """
    tokens, heads, _ = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    _check(key_cache, value_cache, block_table, out)
    if not chunks.is_contiguous():
        raise ValueError("the chunk table must be contiguous")
    query = query if query.stride(2) == 1 else query.contiguous()
    count = chunks.shape[0]
    if not tokens or not count:
        return
    shape = Heads.of(query, kv_heads, None)
    tile = invariant_tile(shape, block_limit(query.device))

    def launch(tile: PrefillTile) -> None:
        tiles = tokens // (tile.rows // tile.group) + min(count, tokens)
        _chunks_kernel[(heads // tile.group, tiles)](
            query, key_cache, value_cache, block_table, chunks, query if sinks is None else sinks,
            out, count,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
            block_table.stride(0), scale * LOG2_E, window or 0,
            CHUNKS_PAD=triton.next_power_of_2(count), SINKS=sinks is not None,
            num_stages=tile.stages,
            **_common(shape, tile, query, window, soft_cap, block_size),
        )  # fmt: skip

    launch_fitting("attention of chunks in one order", tile, fewer_stages, launch)


def _common(
    shape: Heads,
    tile: PrefillTile,
    query: Tensor,
    window: int | None,
    soft_cap: float | None,
    block_size: int,
) -> dict[str, object]:
    """What both kernels are compiled with."""
    pdl = uses_pdl(query.device)
    return dict(
        BLOCK_SIZE=block_size, GROUP=tile.group, ROWS=tile.rows, D=shape.value_dim,
        D_PAD=shape.value_pad, TILE=tile.keys, MIN_SPLIT=MIN_SPLIT, MAX_SPLITS=MAX_SPLITS,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32", WINDOW=window is not None,
        SOFT_CAP=(soft_cap or 0.0) * LOG2_E, SHARES=max(1, shape.group // tile.group),
        PDL=pdl, num_warps=tile.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip


def _check(*tensors: Tensor) -> None:
    if any(x.stride(-1) != 1 for x in tensors):
        raise ValueError("the last dimensions of caches, block table and out must be contiguous")
