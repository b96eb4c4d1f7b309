"""Triton kernel of paged prefill attention: the chunks of one step, of any requests, in one launch.

The tiling is FlashAttention-2's (Dao, 2023) with the query heads of a group packed next to each
other, over vLLM's block tables. Which chunk a program works on it finds in the step's chunk table
on the device, so the grid depends on shapes alone and the launch can be captured. Tiles count from
the beginning of their chunk and keys from the beginning of the sequence: a token's bits depend on
its chunk, and on nothing else in the step.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.paged_decode_triton import (
    IN_LOG2,
    LOG2_E,
    NEG_INF,
    accumulate,
    capped,
)
from megatron_async.kernels.attention.tiles import (
    Heads,
    PrefillTile,
    prefill_tile,
    smaller_prefills,
)
from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.shared_memory import block_limit
from megatron_async.step import packet

WIDTH = tl.constexpr(packet.CHUNK_WIDTH)
SLOT = tl.constexpr(packet.CHUNK_SLOT)
FIRST = tl.constexpr(packet.CHUNK_FIRST)
LENGTH = tl.constexpr(packet.CHUNK_LENGTH)
START = tl.constexpr(packet.CHUNK_START)
NO_CHUNK = tl.constexpr(1 << 30)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def attend_tile(
    start, query, query_more, position, end, highest, mass, total, key_ptr, value_ptr, table_ptr,
    key_block, key_token, value_block, value_token, scale, window,
    IS_EDGE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    LATENT: tl.constexpr, MORE: tl.constexpr, MORE_PAD: tl.constexpr,
):  # fmt: skip
    """Keys ``start .. start + TILE`` into the running maximum, mass and unnormalised sum.

    IS_EDGE: not all of the tokens see all of the keys. LATENT: keys have D elements, which are
    their values too, and MORE.
    """
    d = tl.arange(0, D_PAD)
    place = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        token = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        # Behind the last token the table may end.
        block = tl.load(table_ptr + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)
        token = place % BLOCK_SIZE
    key_at = (block * key_block + token * key_token)[:, None] + d[None, :]
    value_at = (block * value_block + token * value_token)[:, None] + d[None, :]
    if IS_EDGE:
        # Masked to zero: what no token sees may be NaN, and 0 * NaN would spread.
        seen = place < end
        if WINDOW:
            seen = seen & (place > tl.min(position, 0) - window)
        mask = seen[:, None]
        if D != D_PAD:
            mask = mask & (d < D)[None, :]
        key = tl.load(key_ptr + key_at, mask=mask, other=0.0)
        value = key if LATENT else tl.load(value_ptr + value_at, mask=mask, other=0.0)
    elif D != D_PAD:
        in_head = tl.broadcast_to((d < D)[None, :], [TILE, D_PAD])
        key = tl.load(key_ptr + key_at, mask=in_head, other=0.0)
        value = key if LATENT else tl.load(value_ptr + value_at, mask=in_head, other=0.0)
    else:
        key = tl.load(key_ptr + key_at)
        value = key if LATENT else tl.load(value_ptr + value_at)

    key, value = key.to(query.dtype), value.to(query.dtype)  # of e4m3, which is exact
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if LATENT:
        more = tl.arange(0, MORE_PAD)
        more_at = (block * key_block + token * key_token)[:, None] + D + more[None, :]
        in_more = tl.broadcast_to((more < MORE)[None, :], [TILE, MORE_PAD])
        if IS_EDGE:
            in_more = in_more & seen[:, None]
        key_more = tl.load(key_ptr + more_at, mask=in_more, other=0.0).to(query.dtype)
        score = tl.dot(query_more, tl.trans(key_more), score, input_precision=PRECISION)
    score = score * scale
    score = capped(score, SOFT_CAP)
    if IS_EDGE:
        sees = place[None, :] <= position[:, None]
        if WINDOW:
            sees = sees & (place[None, :] > position[:, None] - window)
        score = tl.where(sees, score, NEG_INF)
    return accumulate(score, value, highest, mass, total, PRECISION)


@triton.jit
def _prefill_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, chunks_ptr, sinks_ptr, out_ptr, chunk_count,
    query_row, query_head, out_row, out_head, key_block, key_token, key_head,
    value_block, value_token, value_head, table_row, scale, window,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CHUNKS_PAD: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, LATENT: tl.constexpr,
    MORE: tl.constexpr, MORE_PAD: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one chunk, for GROUP heads; SHARES programs share a head of keys."""
    TOKENS: tl.constexpr = ROWS // GROUP
    part = tl.program_id(0)
    kv_head = part // SHARES
    # The last tiles of a chunk attend to most: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # A chunk's tiles begin at `first // TOKENS + index`, which leaves room for the ragged tiles of
    # all chunks before it. Entries behind the last chunk begin behind the last tile.
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
    query_more = query
    if LATENT:
        more = tl.arange(0, MORE_PAD)
        more_at = (token * query_row + head * query_head)[:, None] + D + more[None, :]
        is_more = (row < count * GROUP)[:, None] & (more < MORE)[None, :]
        query_more = tl.load(query_ptr + more_at, mask=is_more, other=0.0)
    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head

    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    # Tiles that all of the tokens see, then those that only some do.
    seen = (begin + 1) // TILE * TILE
    highest = tl.full([ROWS], NEG_INF, tl.float32)
    whole = 0
    if WINDOW:
        # Before them, those that the last tokens no longer see. A tile may have nothing for a
        # token then, so its maximum begins with a number.
        highest = tl.full([ROWS], LOWEST, tl.float32)
    if SINKS:
        # One more score, of a token without a value; it comes first.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * IN_LOG2
        highest = tl.maximum(sink, LOWEST)
        mass = tl.exp2(sink - highest)
    if WINDOW:
        left = tl.maximum(begin + 1 - window, 0) // TILE * TILE
        whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE) * TILE, seen)
        whole = tl.maximum(whole, left)
        for start in range(left, whole, TILE):
            highest, mass, total = attend_tile(
                start, query, query_more, position, end, highest, mass, total, key_ptr, value_ptr,
                table_ptr, key_block, key_token, value_block, value_token, scale, window,
                True, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP,
                LATENT, MORE, MORE_PAD,
            )  # fmt: skip
    for start in range(whole, seen, TILE):
        highest, mass, total = attend_tile(
            start, query, query_more, position, end, highest, mass, total, key_ptr, value_ptr,
            table_ptr, key_block, key_token, value_block, value_token, scale, window,
            False, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP,
            LATENT, MORE, MORE_PAD,
        )  # fmt: skip
    for start in range(seen, end, TILE):
        highest, mass, total = attend_tile(
            start, query, query_more, position, end, highest, mass, total, key_ptr, value_ptr,
            table_ptr, key_block, key_token, value_block, value_token, scale, window,
            True, BLOCK_SIZE, D, D_PAD, TILE, PRECISION, WINDOW, SOFT_CAP,
            LATENT, MORE, MORE_PAD,
        )  # fmt: skip
    out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
    out_at = (token * out_row + head * out_head)[:, None] + d[None, :]
    tl.store(out_ptr + out_at, out, mask=is_row)


def paged_mixed_attention_triton(
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
    latent: int | None = None,
) -> None:
    """``paged_prefill.paged_mixed_attention`` for bfloat16, float16 and float32, and sizes of
    heads that ``paged_attention.has_kernel`` knows.

    Caches may be strided; only their head dimension must be contiguous. Nothing waits for the
    device, and the launch depends on shapes alone.

    Raises:
        ValueError: the last dimension of a cache, of a table or of ``out`` is strided.
    """
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    if any(x.stride(-1) != 1 for x in (key_cache, value_cache, block_table, out)):
        raise ValueError("the last dimensions of caches, block table and out must be contiguous")
    if not chunks.is_contiguous():
        raise ValueError("the chunk table must be contiguous")
    if query.stride(2) != 1:
        query = query.contiguous()
    count = chunks.shape[0]
    value_dim = latent or head_dim
    if not tokens or not count:
        return
    shape = Heads.of(query, kv_heads, latent)

    def launch(tile: PrefillTile) -> None:
        tiles = tokens // (tile.rows // tile.group) + min(count, tokens)
        _prefill_kernel[(heads // tile.group, tiles)](
            query, key_cache, value_cache, block_table, chunks, query if sinks is None else sinks,
            out, count,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            key_cache.stride(0), key_cache.stride(1), 0 if latent else key_cache.stride(2),
            value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
            block_table.stride(0), scale * LOG2_E, window or 0,
            BLOCK_SIZE=block_size, GROUP=tile.group, D=value_dim, D_PAD=shape.value_pad,
            ROWS=tile.rows, TILE=tile.keys, CHUNKS_PAD=triton.next_power_of_2(count),
            PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
            WINDOW=window is not None, SOFT_CAP=(soft_cap or 0.0) * LOG2_E,
            SINKS=sinks is not None, LATENT=latent is not None, MORE=head_dim - value_dim,
            MORE_PAD=shape.more_pad, SHARES=max(1, shape.group // tile.group),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    tile = prefill_tile(shape, block_limit(query.device))
    launch_fitting("prefill attention", tile, smaller_prefills, launch)
