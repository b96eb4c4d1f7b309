"""Triton kernels of paged decode attention: each row in splits, then the splits of each row.

Splitting the keys and values of one row over programs is Flash-Decoding (Dao et al., 2023) over
vLLM's block tables. How a row is split depends on its own length alone, tiles and orders of
summation are fixed, and no program sees two rows: a row's bits depend on nothing but its own
query, keys, values and length.

In multi-latent attention all heads share one key, whose first elements are its value: they take it
in tiles of heads, and read it once.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.tiles import (
    Heads,
    SplitTile,
    smaller_splits,
    split_tile,
)
from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.shared_memory import block_limit

MIN_SPLIT = 256
"""Tokens of a split; longer rows take a multiple of it so that they have at most MAX_SPLITS."""
MAX_SPLITS = 32
"""Bounds the programs and the workspace of a row, however long the block table is."""
LATENT_MIN_SPLIT = 128
LATENT_MAX_SPLITS = 64
"""As MIN_SPLIT and MAX_SPLITS, where rows have few heads to be divided by."""
LATENT_WORKSPACE_ELEMENTS = 2**28
"""The workspace of a launch of multi-latent attention, whose sums are wide: more rows take more
launches."""
MOST_ROWS = 8192
"""A launch has at most this many rows: a grid takes 65,535, and the workspace grows with them."""
NUM_WARPS = 4
LOG2_E = math.log2(math.e)
IN_LOG2 = tl.constexpr(LOG2_E)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _row_splits(
    length_ptr, row, capacity, window,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Length of a row, where its first split begins, and the tokens of each of its splits.

    With a window the first split begins at most MIN_SPLIT - 1 tokens before it.
    """
    length = tl.minimum(tl.load(length_ptr + row).to(tl.int32), capacity)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // MIN_SPLIT * MIN_SPLIT
    return length, first, tl.cdiv(length - first, MIN_SPLIT * MAX_SPLITS) * MIN_SPLIT


@triton.jit
def capped(score, SOFT_CAP: tl.constexpr):
    """Scores in units of log2, as ``SOFT_CAP`` (the cap in the same units) times the tanh of
    their share of it; 0 leaves them alone."""
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which no x overflows.
        doubled = tl.exp2(score * (2.0 * 1.4426950408889634 / SOFT_CAP))
        score = SOFT_CAP - (2.0 * SOFT_CAP) / (doubled + 1.0)
    return score


@triton.jit
def accumulate(score, value, highest, mass, total, PRECISION: tl.constexpr):
    """Online softmax (Milakov and Gimelshein, 2018): scores [rows, tile] in units of log2 and
    values [tile, D] into running maximum and mass [rows] and unnormalised sum [rows, D]."""
    raised = tl.maximum(highest, tl.max(score, 1))
    decay = tl.exp2(highest - raised)
    weight = tl.exp2(score - raised[:, None])
    mass = mass * decay + tl.sum(weight, 1)
    total = total * decay[:, None]
    total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION)
    return raised, mass, total


@triton.jit
def _split_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, table_rows_ptr, length_ptr, partial_ptr, stats_ptr,
    query_row, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    table_row, columns, splits, scale, window,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, HAS_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, LATENT: tl.constexpr, MORE: tl.constexpr, MORE_PAD: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """One split of one row for GROUP heads: unnormalised sum, maximum and mass.

    Scores are in units of log2. Splits beyond the row's length are left unwritten. LATENT: keys
    have D elements, which are their values too, and MORE. SHARES programs share a head of keys.
    """
    part = tl.program_id(0)
    kv_head = part // SHARES
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length, first, split_size = _row_splits(
        length_ptr, row, columns * BLOCK_SIZE, window, MIN_SPLIT, MAX_SPLITS, WINDOW
    )
    begin = first + split * split_size
    if begin >= length:
        return
    end = tl.minimum(begin + split_size, length)
    if WINDOW:
        # No tile is without a token that is seen.
        seen = tl.maximum(begin, length - window)
        begin = seen // TILE * TILE

    member = tl.arange(0, GROUP_PAD)
    head = part * GROUP + member
    d = tl.arange(0, D_PAD)
    in_head = d < D
    query = tl.load(
        query_ptr + row * query_row + head[:, None] * query_head + d[None, :],
        mask=(member < GROUP)[:, None] & in_head[None, :], other=0.0,
    )  # fmt: skip
    more = tl.arange(0, MORE_PAD)
    if LATENT:
        query_more = tl.load(
            query_ptr + row * query_row + head[:, None] * query_head + D + more[None, :],
            mask=(member < GROUP)[:, None] & (more < MORE)[None, :], other=0.0,
        )  # fmt: skip
    if HAS_ROWS:
        table_ptr += tl.load(table_rows_ptr + row).to(tl.int64) * table_row
    else:
        table_ptr += row * table_row
    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head

    highest = tl.full([GROUP_PAD], NEG_INF, tl.float32)
    mass = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_valid = position < end
        if WINDOW:
            is_valid = is_valid & (position >= seen)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
            token = start % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_valid, other=0)
            block = block.to(tl.int64)
            token = position % BLOCK_SIZE
        # Masked to zero: what lies outside of the row's may be NaN, and 0 * NaN would spread.
        mask = is_valid[:, None]
        if D != D_PAD:
            mask = mask & in_head[None, :]
        key_at = block * key_block + token * key_token
        key = tl.load(key_ptr + key_at[:, None] + d[None, :], mask=mask, other=0.0)
        key = key.to(query.dtype)  # of e4m3, which is exact
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if LATENT:
            value = key
            in_more = is_valid[:, None] & (more < MORE)[None, :]
            key = tl.load(key_ptr + key_at[:, None] + D + more[None, :], mask=in_more, other=0.0)
            key = key.to(query.dtype)
            score = tl.dot(query_more, tl.trans(key), score, input_precision=PRECISION)
        else:
            value_at = block * value_block + token * value_token
            value = tl.load(value_ptr + value_at[:, None] + d[None, :], mask=mask, other=0.0)
            value = value.to(query.dtype)
        score = score * scale
        score = capped(score, SOFT_CAP)
        score = tl.where(is_valid[None, :], score, NEG_INF)
        highest, mass, total = accumulate(score, value, highest, mass, total, PRECISION)

    heads = tl.num_programs(0) * GROUP
    at = (row * heads + head) * splits + split
    tl.store(
        partial_ptr + at[:, None] * D + d[None, :], total,
        mask=(member < GROUP)[:, None] & in_head[None, :],
    )  # fmt: skip
    tl.store(stats_ptr + at * 2, highest, mask=member < GROUP)
    tl.store(stats_ptr + at * 2 + 1, mass, mask=member < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr, stats_ptr, length_ptr, sinks_ptr, out_ptr, capacity, splits, window,
    D: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one row, CHUNK at a time in their order; a sink is one more
    score, of a token without a value."""
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    length, first, split_size = _row_splits(
        length_ptr, row, capacity, window, MIN_SPLIT, MAX_SPLITS, WINDOW
    )
    count = tl.cdiv(length - first, split_size)
    partial_ptr += at * splits * D
    stats_ptr += at * splits * 2
    every = tl.arange(0, MAX_SPLITS)
    highest = tl.max(tl.load(stats_ptr + every * 2, mask=every < count, other=NEG_INF), 0)
    d = tl.arange(0, D_PAD)
    mass = 0.0
    if SINKS:
        sink = tl.load(sinks_ptr + tl.program_id(1)).to(tl.float32) * IN_LOG2
        highest = tl.maximum(highest, sink)
        mass = tl.exp2(sink - highest)
    total = tl.zeros([D_PAD], tl.float32)
    for chunk in range(0, count, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        exists = split < count
        weight = tl.exp2(tl.load(stats_ptr + split * 2, mask=exists, other=NEG_INF) - highest)
        mass += tl.sum(weight * tl.load(stats_ptr + split * 2 + 1, mask=exists, other=0.0), 0)
        part = tl.load(
            partial_ptr + split[:, None] * D + d[None, :],
            mask=exists[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(part * weight[:, None], 0)
    tl.store(out_ptr + at * D + d, (total / mass).to(out_ptr.dtype.element_ty), mask=d < D)


def paged_decode_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    table_rows: Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    latent: int | None = None,
) -> Tensor:
    """``paged_decode.paged_decode_attention`` for bfloat16, float16 and float32, and sizes of
    heads that ``paged_attention.has_kernel`` knows.

    Caches may be strided; only their head dimension must be contiguous. Lengths are at least 1.
    Nothing waits for the device, and allocations depend on shapes alone.

    Raises:
        ValueError: the head dimension of a cache is strided.
    """
    rows, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("the head dimension of the key and value caches must be contiguous")
    if query.stride(2) != 1:
        query = query.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    if table_rows is not None:
        table_rows = table_rows.contiguous()
    lengths = lengths.contiguous()
    columns = block_table.shape[1]
    capacity = columns * block_size
    value_dim = latent or head_dim
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    shape, limit = Heads.of(query, kv_heads, latent), block_limit(query.device)
    min_split, max_splits = MIN_SPLIT, MAX_SPLITS
    if latent is not None:
        min_split, max_splits = LATENT_MIN_SPLIT, LATENT_MAX_SPLITS
    # A window has tokens of one split more than its size.
    reach = capacity if window is None else min(capacity, window + min_split - 1)
    splits = min(max_splits, triton.cdiv(reach, min_split))
    most = MOST_ROWS
    if latent is not None:
        most = max(1, min(most, LATENT_WORKSPACE_ELEMENTS // (heads * splits * value_dim)))
    if rows > most:
        for first in range(0, rows, most):
            some = slice(first, first + most)
            out[some] = paged_decode_attention_triton(
                query[some],
                key_cache,
                value_cache,
                block_table[some] if table_rows is None else block_table,
                lengths[some],
                scale,
                None if table_rows is None else table_rows[some],
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                latent=latent,
            )
        return out
    partial = query.new_empty((rows, heads, splits, value_dim), dtype=torch.float32)
    stats = query.new_empty((rows, heads, splits, 2), dtype=torch.float32)

    def launch(tile: SplitTile) -> None:
        _split_kernel[(heads // tile.group, splits, rows)](
            query, key_cache, value_cache, block_table,
            block_table if table_rows is None else table_rows, lengths, partial, stats,
            query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1),
            0 if latent else key_cache.stride(2), value_cache.stride(0), value_cache.stride(1),
            value_cache.stride(2), block_table.stride(0), columns, splits, scale * LOG2_E,
            window or 0, BLOCK_SIZE=block_size, GROUP=tile.group, GROUP_PAD=tile.rows,
            D=value_dim, D_PAD=shape.value_pad, TILE=tile.keys, HAS_ROWS=table_rows is not None,
            PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
            MIN_SPLIT=min_split, MAX_SPLITS=max_splits, WINDOW=window is not None,
            SOFT_CAP=(soft_cap or 0.0) * LOG2_E,
            LATENT=latent is not None, MORE=head_dim - value_dim, MORE_PAD=shape.more_pad,
            SHARES=max(1, shape.group // tile.group), num_warps=NUM_WARPS, num_stages=tile.stages,
        )  # fmt: skip

    launch_fitting("decode attention", split_tile(shape, limit), smaller_splits, launch)
    _combine_kernel[(rows, heads)](
        partial, stats, lengths, stats if sinks is None else sinks, out, capacity, splits,
        window or 0,
        D=value_dim, D_PAD=shape.value_pad, CHUNK=8, MIN_SPLIT=min_split,
        MAX_SPLITS=max_splits, WINDOW=window is not None, SINKS=sinks is not None,
        num_warps=2,
    )  # fmt: skip
    return out
