"""Grouped GEMMs of experts that have many tokens each, as two Triton kernels.

They do what those of ``grouped_triton.py`` do, with the same bits: TMA brings the weights, and in
the second also the rows, which lie next to each other there. The last tile of an expert computes
half of its rows if the other half is not there. In the second kernel programs stay on their
multiprocessor, and operands of the next tile come in while one is stored; the first would lose by
that, since its rows come from where the tokens are.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.moe.experts_triton import activate, at_least, at_most
from megatron_async.kernels.pdl import pdl_enter


@triton.jit
def place_of(program, tiles, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Tile of rows and block of columns of a program. ``TOGETHER`` tiles of rows run side by side,
    which share their weights in the L2 cache."""
    of_group: tl.constexpr = TOGETHER * BLOCKS
    first = program // of_group * TOGETHER
    side_by_side = tl.minimum(tiles - first, TOGETHER)
    place = program % of_group
    return first + place % side_by_side, place // side_by_side


@triton.jit
def _up_tile(
    x_ptr, w_desc, bias_ptr, order_ptr, out_ptr, expert, first, end, block,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``end``, at most ``ROWS`` of them, and ``WIDTH`` columns of the output."""
    row = first + tl.arange(0, ROWS)
    has_row = row < end
    token = tl.load(order_ptr + row, mask=has_row, other=0) // TOP_K
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([ROWS, 2 * WIDTH], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
        w = tl.reshape(w_desc.load([2 * expert, block * WIDTH, start]), [2 * WIDTH, BLOCK_K])
        total = tl.dot(tl.load(x_ptrs + start), w.T, total)
    gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, WIDTH]), [0, 2, 1]))
    column = block * WIDTH + tl.arange(0, WIDTH)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * (2 * INNER) + column
        gate += tl.load(bias_ptrs, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + INNER, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
    if LIMIT is not None:
        gate = at_most(gate, LIMIT)
        up = at_most(at_least(up, -LIMIT), LIMIT)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * INNER + column[None, :],
        (activate(gate, FUNCTION) * (up + OFFSET)).to(out_ptr.dtype.element_ty),
        mask=has_row[:, None] & (column < INNER)[None, :],
    )


@triton.jit(do_not_specialize=["most_tiles"])
def grouped_wide_up_kernel(
    x_ptr, w_desc, bias_ptr, order_ptr, tiles_ptr, out_ptr, most_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, FUNCTION: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """First linear layers and a gated activation: ``[slots, INNER]`` in the order of the experts.

    ``BLOCK_K`` divides ``HIDDEN``. A block of ``WIDTH`` rows of the gate's weight, and those of the
    other half, are a program's, in one operand: ``w_desc`` is ``[2 experts, INNER, HIDDEN]``. A
    thread has both numbers of each pair.
    """
    BLOCKS: tl.constexpr = (INNER + WIDTH - 1) // WIDTH
    tile, block = place_of(tl.program_id(0), most_tiles, BLOCKS, TOGETHER)
    pdl_enter(PDL)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + most_tiles + tile)
    end = tl.load(tiles_ptr + 2 * most_tiles + tile)
    if end - first > BLOCK_M // 2:
        _up_tile(
            x_ptr, w_desc, bias_ptr, order_ptr, out_ptr, expert, first, end, block, HIDDEN, INNER,
            TOP_K, BLOCK_M, WIDTH, BLOCK_K, FUNCTION, LIMIT, OFFSET, HAS_BIAS, NUM_STAGES,
        )  # fmt: skip
    else:
        _up_tile(
            x_ptr, w_desc, bias_ptr, order_ptr, out_ptr, expert, first, end, block, HIDDEN, INNER,
            TOP_K, BLOCK_M // 2, WIDTH, BLOCK_K, FUNCTION, LIMIT, OFFSET, HAS_BIAS, NUM_STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["most_tiles"])
def grouped_wide_down_kernel(
    x_desc, w_desc, bias_ptr, order_ptr, tiles_ptr, weights_ptr, out_ptr, most_tiles,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second linear layers, times the routing weights: ``[slots, HIDDEN]`` by slots."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    pdl_enter(PDL)
    tiles = tl.load(tiles_ptr + 3 * most_tiles)
    for item in tl.range(tl.program_id(0), tiles * BLOCKS, tl.num_programs(0), flatten=True):
        tile, block = place_of(item, tiles, BLOCKS, TOGETHER)
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + most_tiles + tile)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, INNER, BLOCK_K, num_stages=NUM_STAGES):
            x = x_desc.load([first, start])
            w = w_desc.load([expert * HIDDEN + block * BLOCK_N, start])
            total = tl.dot(x, w.T, total)
        row = first + tl.arange(0, BLOCK_M)
        has_row = row < tl.load(tiles_ptr + 2 * most_tiles + tile)
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            bias_ptrs = bias_ptr + expert * HIDDEN + column
            bias = tl.load(bias_ptrs, mask=column < HIDDEN, other=0.0)
            total += bias.to(tl.float32)[None, :]
        slot = tl.load(order_ptr + row, mask=has_row, other=0)
        total = total * tl.load(weights_ptr + slot, mask=has_row, other=0.0)[:, None]
        tl.store(
            out_ptr + slot.to(tl.int64)[:, None] * HIDDEN + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=has_row[:, None] & (column < HIDDEN)[None, :],
        )
