"""The experts of many tokens, as five Triton kernels: two that order the rows by expert, two
grouped GEMMs, and the sum over a token's experts.

A *slot* is a place in the table of a token's experts, token x k + place. Slots with a negative id
have no expert here and are in no list. The others are ordered by expert, and by number within one,
and each expert's are cut into tiles of rows. The host reads no count: grids are for the most tiles
that there may be, and programs of tiles that are not there end at once.

A row's sums depend on the row and on the sizes of the tiles alone. No atomics add anything up.
Weights may be e4m3 or MXFP4, which are widened as in ``experts_triton.py``. If they are e4m3
rows may be as well, with as many scales: sums leave the tensor cores as in
``gemm/scaled_e4m3.py``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.moe.experts_triton import (
    activate,
    at_least,
    at_most,
    multiply,
    multiply_e4m3,
)
from megatron_async.kernels.moe.many.wide_triton import place_of
from megatron_async.kernels.moe.mxfp4_triton import MISSING, mxfp4_factors, widen_mxfp4
from megatron_async.kernels.pdl import pdl_enter


@triton.jit(do_not_specialize=["slots", "chunk"])
def count_kernel(
    ids_ptr, counts_ptr, slots, chunk,
    PADDED: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How many slots of a chunk have each expert: int32 ``[programs, PADDED]``."""
    program = tl.program_id(0)
    pdl_enter(PDL)
    expert = tl.arange(0, PADDED)
    count = tl.zeros([PADDED], tl.int32)
    for first in range(0, chunk, STEP):
        slot = program * chunk + first + tl.arange(0, STEP)
        chosen = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
        count += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + program * PADDED + expert, count)


@triton.jit(do_not_specialize=["slots", "chunk", "programs", "most_tiles", "tile_rows"])
def order_kernel(
    ids_ptr, counts_ptr, order_ptr, tiles_ptr, slots, chunk, programs, most_tiles, tile_rows,
    PADDED: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots in the order of their experts, and the tiles: int32 ``[3, most_tiles]``, the expert or
    -1 for a tile that is not there, its first row, and the row behind its expert's last one. Behind
    them is the number of tiles that are there."""
    program = tl.program_id(0)
    pdl_enter(PDL)
    expert = tl.arange(0, PADDED)
    before = tl.zeros([PADDED], tl.int32)
    total = tl.zeros([PADDED], tl.int32)
    for first in range(0, programs, STEP):
        other = first + tl.arange(0, STEP)
        counts = tl.load(
            counts_ptr + other[:, None] * PADDED + expert[None, :],
            mask=(other < programs)[:, None], other=0,
        )  # fmt: skip
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < program)[:, None], counts, 0), 0)
    end = tl.cumsum(total, 0)
    begin = end - total
    free = begin + before
    for first in range(0, chunk, STEP):
        slot = program * chunk + first + tl.arange(0, STEP)
        chosen = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
        is_one = (chosen[:, None] == expert[None, :]).to(tl.int32)
        row = tl.sum(is_one * (tl.cumsum(is_one, 0) - 1 + free[None, :]), 1)
        tl.store(order_ptr + row, slot, mask=chosen >= 0)
        free += tl.sum(is_one, 0)

    tile_count = (total + tile_rows - 1) // tile_rows
    tile_end = tl.cumsum(tile_count, 0)
    first_tile = tile_end - tile_count
    tl.store(tiles_ptr + 3 * most_tiles, tl.sum(tile_count, 0), mask=program == 0)
    for first in range(program * STEP, most_tiles, programs * STEP):
        tile = first + tl.arange(0, STEP)
        of_tile = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_one = of_tile[:, None] == expert[None, :]
        row = begin[None, :] + (tile[:, None] - first_tile[None, :]) * tile_rows
        row = tl.sum(tl.where(is_one, row, 0), 1)
        behind = tl.sum(tl.where(is_one, end[None, :], 0), 1)
        is_there = tile < most_tiles
        tl.store(tiles_ptr + tile, tl.where(of_tile < PADDED, of_tile, -1), mask=is_there)
        tl.store(tiles_ptr + most_tiles + tile, row, mask=is_there)
        tl.store(tiles_ptr + 2 * most_tiles + tile, behind, mask=is_there)


@triton.jit
def _scales(scale_ptr, row, column, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Scales of rows of an e4m3 weight at a column, or at its last one."""
    group = tl.minimum(column, DEPTH - 1) // COLUMNS
    return tl.load(scale_ptr + row * (DEPTH // COLUMNS) + group)


@triton.jit
def _products(
    x_ptrs, x_scale_ptrs, w_ptr, row, scale_ptr, has_row,
    DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, COLUMNS: tl.constexpr,
    MXFP4: tl.constexpr, E4M3_ROWS: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BLOCK_M, BLOCK_N]``: rows times rows of the weight.

    Args:
        x_ptrs, x_scale_ptrs: to the first element of each row, and with ``E4M3_ROWS`` to the first
            of its scales.
        row: int64, rows of the weight, which are there; those of all experts lie in one.
        scale_ptr: of e4m3 with a scale for ``COLUMNS`` of a row, or of MXFP4, by words.
    """
    PACK: tl.constexpr = 8 if MXFP4 else 1  # numbers of what is loaded at once
    WIDTH: tl.constexpr = DEPTH // PACK
    k = tl.arange(0, BLOCK_K)
    of_k = tl.arange(0, BLOCK_K // PACK)
    x_ptrs = x_ptrs[:, None] + k[None, :]
    w_ptrs = w_ptr + row[:, None] * WIDTH + of_k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    if COLUMNS:
        scale = _scales(scale_ptr, row, 0, DEPTH, COLUMNS)
    if MXFP4:
        factor = mxfp4_factors(scale_ptr, row, row >= 0, of_k, WIDTH)
    for start in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
        if DEPTH % BLOCK_K == 0:
            x = tl.load(x_ptrs + start, mask=has_row[:, None], other=0.0)
            w = tl.load(w_ptrs + start // PACK)
        else:
            in_k = (start + k < DEPTH)[None, :]
            x = tl.load(x_ptrs + start, mask=has_row[:, None] & in_k, other=0.0)
            in_row = (start // PACK + of_k < WIDTH)[None, :]
            w = tl.load(w_ptrs + start // PACK, mask=in_row, other=0.0)
        # Scales of a step are loaded in the one before.
        if MXFP4:
            w = widen_mxfp4(w, factor, BLOCK_N, BLOCK_K)
            factor = mxfp4_factors(
                scale_ptr, row, row >= 0, (start + BLOCK_K) // PACK + of_k, WIDTH
            )
        if E4M3_ROWS and COLUMNS == DEPTH:
            if SWAP:
                total = tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
            else:
                total = tl.dot(x, tl.trans(w), total, max_num_imprecise_acc=BLOCK_K)
        elif E4M3_ROWS:
            x_scale = tl.load(x_scale_ptrs + start // COLUMNS, mask=has_row, other=0.0)
            if SWAP:
                total += tl.dot(w, tl.trans(x)) * scale[:, None] * x_scale[None, :]
            else:
                total += tl.dot(x, tl.trans(w)) * x_scale[:, None] * scale[None, :]
            scale = _scales(scale_ptr, row, start + BLOCK_K, DEPTH, COLUMNS)
        elif COLUMNS > 0 and COLUMNS < DEPTH:
            total = multiply_e4m3(x, w, scale, total, SWAP, PRECISION)
            scale = _scales(scale_ptr, row, start + BLOCK_K, DEPTH, COLUMNS)
        else:
            total = multiply(x, w.to(x.dtype), total, SWAP, PRECISION, COLUMNS > 0 or MXFP4)
    if SWAP:
        total = tl.trans(total)
    if E4M3_ROWS and COLUMNS == DEPTH:
        total *= tl.load(x_scale_ptrs, mask=has_row, other=0.0)[:, None]
    if COLUMNS == DEPTH:
        total *= scale[None, :]
    if MXFP4:
        total *= MISSING
    return total


@triton.jit(do_not_specialize=["most_tiles"])
def grouped_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, order_ptr, tiles_ptr, out_ptr, most_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    GATED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, COLUMNS: tl.constexpr, MXFP4: tl.constexpr,
    E4M3_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First linear layers, and the activation: ``[slots, INNER]`` in the order of the experts.

    Rows come from where the tokens are. ``BLOCK_N`` rows of the weight are a program's; gated, they
    are pairs of a row of the gate and one of the other half, which lie in one thread at the end.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    tile, block = place_of(tl.program_id(0), most_tiles, (INNER + WIDTH - 1) // WIDTH, TOGETHER)
    pdl_enter(PDL)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + most_tiles + tile) + tl.arange(0, BLOCK_M)
    has_row = row < tl.load(tiles_ptr + 2 * most_tiles + tile)
    token = tl.load(order_ptr + row, mask=has_row, other=0) // TOP_K
    n = tl.arange(0, BLOCK_N)
    # What lies behind the last row of the weight is read again, and not written.
    of_weight = n % PARTS * INNER + tl.minimum(block * WIDTH + n // PARTS, INNER - 1)
    total = _products(
        x_ptr + token.to(tl.int64) * HIDDEN,
        x_scale_ptr + token * (HIDDEN // COLUMNS if E4M3_ROWS else 0), w_ptr,
        expert.to(tl.int64) * (PARTS * INNER) + of_weight, scale_ptr, has_row, HIDDEN, BLOCK_M,
        BLOCK_N, BLOCK_K, SWAP, PRECISION, NUM_STAGES, COLUMNS, MXFP4, E4M3_ROWS,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * (PARTS * INNER) + of_weight)
        total += bias.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, WIDTH, 2]))
        if LIMIT is not None:
            gate = at_most(gate, LIMIT)
            up = at_most(at_least(up, -LIMIT), LIMIT)
        out = activate(gate, FUNCTION) * (up + OFFSET)
    else:
        if LIMIT is not None:
            total = at_most(total, LIMIT)
        out = activate(total, FUNCTION)
    column = block * WIDTH + tl.arange(0, WIDTH)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * INNER + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=has_row[:, None] & (column < INNER)[None, :],
    )


@triton.jit(do_not_specialize=["most_tiles"])
def grouped_down_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, order_ptr, tiles_ptr, weights_ptr, out_ptr,
    most_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, COLUMNS: tl.constexpr, MXFP4: tl.constexpr,
    E4M3_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second linear layers, times the routing weights: ``[slots, HIDDEN]`` by slots."""
    tile, block = place_of(
        tl.program_id(0), most_tiles, (HIDDEN + BLOCK_N - 1) // BLOCK_N, TOGETHER
    )
    pdl_enter(PDL)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + most_tiles + tile) + tl.arange(0, BLOCK_M)
    has_row = row < tl.load(tiles_ptr + 2 * most_tiles + tile)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    of_weight = tl.minimum(column, HIDDEN - 1)
    total = _products(
        x_ptr + row.to(tl.int64) * INNER,
        x_scale_ptr + row * (INNER // COLUMNS if E4M3_ROWS else 0), w_ptr,
        expert.to(tl.int64) * HIDDEN + of_weight, scale_ptr, has_row, INNER, BLOCK_M, BLOCK_N,
        BLOCK_K, SWAP, PRECISION, NUM_STAGES, COLUMNS, MXFP4, E4M3_ROWS,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * HIDDEN + of_weight).to(tl.float32)[None, :]
    slot = tl.load(order_ptr + row, mask=has_row, other=0)
    total = total * tl.load(weights_ptr + slot, mask=has_row, other=0.0)[:, None]
    tl.store(
        out_ptr + slot.to(tl.int64)[:, None] * HIDDEN + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=has_row[:, None] & (column < HIDDEN)[None, :],
    )


@triton.jit
def sum_kernel(
    x_ptr, ids_ptr, out_ptr,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's slots added up in their order, in fp32, without those that have no expert."""
    token = tl.program_id(0).to(tl.int64)
    pdl_enter(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        slot = token * TOP_K + place
        mask = (column < HIDDEN) & (tl.load(ids_ptr + slot) >= 0)
        total += tl.load(x_ptr + slot * HIDDEN + column, mask=mask, other=0.0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + column, out, mask=column < HIDDEN)
