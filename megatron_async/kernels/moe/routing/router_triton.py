"""The router of a decode step in Triton: norm, logits, choice, and which row needs which expert.

Programs take experts by a slice of the hidden size each, and leave partial logits. Of few logits
the last to come adds them up in order, so the sums are the same in every run, chooses the experts
of all rows, and writes what the GEMMs read: which experts have rows, which these are, and their
weights. Of many a second kernel does this, whose programs have some rows each.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.moe.routing.choice_triton import (
    BLOCK_E,
    GATE_PLACES,
    choose_rows,
    list_experts,
)
from megatron_async.kernels.pdl import pdl_enter

_STATISTICS = tl.constexpr(4096)
"""Partial statistics, of all rows together, that are on their way at once."""


@triton.jit
def _row_scale(
    statistics_ptr, row, in_rows, tiles, eps,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of each row, from its producer's partial statistics."""
    TILES: tl.constexpr = _STATISTICS // ROWS
    mean = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = statistics_ptr + (row[:, None] * tiles + tile[None, :]) * 2
        mask = in_rows[:, None] & (tile < tiles)[None, :]
        means = tl.load(at, mask=mask, other=0.0)
        squares = tl.load(at + 1, mask=mask, other=0.0)
        if CENTER:
            squares += means * means * (HIDDEN / tiles)
            mean += tl.sum(means, 1)
        square += tl.sum(squares, 1)
    mean = mean / tiles
    return mean, 1.0 / tl.sqrt(square / HIDDEN - mean * mean + eps)


@triton.jit(do_not_specialize=["rows", "tiles", "first_live"])
def router_kernel(
    hidden_ptr, norm_weight_ptr, norm_bias_ptr, statistics_ptr, tiles, eps, weight_ptr, bias_ptr,
    expert_bias_ptr, gate_ptr, live_ptr, first_live, scaling, normed_ptr, partial_ptr, arrivals_ptr,
    ids_ptr, weights_ptr, experts_ptr, bits_ptr, weight_of_ptr, count_ptr, rows,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr, SPLITS: tl.constexpr, EXPERT_BLOCKS: tl.constexpr,
    CENTER: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_EXPERT_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LIVE: tl.constexpr,
    SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    OF_GROUP_PADDED: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
    APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See :class:`~..decode.MoeDecode`. The grid is ``EXPERT_BLOCKS * SPLITS``.

    Of partial logits a split has ``[ROWS, WIDTH]``: the experts', and that of the shared experts'
    gate. ``BLOCK_H`` elements of the hidden size are a program's. ``CHUNK`` rows are chosen for at
    once, or with ``APART`` none: :func:`choose_kernel` does it. What is written counts experts from
    ``FIRST`` on, and leaves out all but ``HELD`` of them.
    """
    WIDTH: tl.constexpr = EXPERT_BLOCKS * BLOCK_E + GATE_PLACES
    program = tl.program_id(0)
    block, split = program % EXPERT_BLOCKS, program // EXPERT_BLOCKS
    expert = block * BLOCK_E + tl.arange(0, BLOCK_E)
    column = split * BLOCK_H + tl.arange(0, BLOCK_H)
    in_hidden = column < HIDDEN
    # Parameters: nobody writes them, so they are read before the kernel in front has ended.
    weight = tl.load(
        weight_ptr + expert[:, None] * HIDDEN + column[None, :],
        mask=(expert < EXPERTS)[:, None] & in_hidden[None, :],
        other=0.0,
    )
    norm_weight = tl.load(norm_weight_ptr + column, mask=in_hidden, other=0.0).to(tl.float32)
    pdl_enter(PDL)

    row = tl.arange(0, ROWS)
    in_rows = row < rows
    at = row[:, None] * HIDDEN + column[None, :]
    mask = in_rows[:, None] & in_hidden[None, :]
    x = tl.load(hidden_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean, scale = _row_scale(statistics_ptr, row, in_rows, tiles, eps, HIDDEN, ROWS, CENTER)
    if CENTER:
        x -= mean[:, None]
    x = x * scale[:, None] * norm_weight[None, :]
    if HAS_NORM_BIAS:
        x += tl.load(norm_bias_ptr + column, mask=in_hidden, other=0.0).to(tl.float32)[None, :]
    normed = tl.where(mask, x, 0.0).to(normed_ptr.dtype.element_ty)
    product = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)
    partial_at = partial_ptr + (split * ROWS + row) * WIDTH
    tl.store(partial_at[:, None] + expert[None, :], product, mask=in_rows[:, None])
    if block == 0:
        tl.store(normed_ptr + at, normed, mask=mask)
        if HAS_GATE:
            gate = tl.load(gate_ptr + column, mask=in_hidden, other=0.0).to(tl.float32)
            of_gate = tl.sum(normed.to(tl.float32) * gate[None, :], 1)
            tl.store(partial_at + EXPERT_BLOCKS * BLOCK_E, of_gate, mask=in_rows)

    if not APART:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
        tl.debug_barrier()
        if arrived == EXPERT_BLOCKS * SPLITS - 1:
            tl.store(arrivals_ptr, 0)  # for the next launch
            bits = tl.zeros([GROUPS_PADDED * OF_GROUP_PADDED], tl.int64)  # which rows an expert has
            all_live = tl.full([], 0, tl.int64)
            for first in range(0, ROWS, CHUNK):
                of_chunk, live = choose_rows(
                    first, partial_ptr, bias_ptr, expert_bias_ptr, live_ptr, first_live, scaling,
                    ids_ptr, weights_ptr, weight_of_ptr, rows,
                    EXPERTS, FIRST, HELD, TOP_K, SHARED, ROWS, CHUNK, SPLITS, EXPERT_BLOCKS,
                    HAS_BIAS, HAS_EXPERT_BIAS, HAS_GATE, HAS_LIVE, SIGMOID, PRE_SOFTMAX, NORMALIZE,
                    GROUPS, KEPT, SUMMED, GROUPS_PADDED, OF_GROUP_PADDED, PLACES,
                )  # fmt: skip
                bits |= of_chunk
                all_live |= live
            list_experts(
                bits, all_live, experts_ptr, bits_ptr, count_ptr, EXPERTS, FIRST, HELD, SHARED,
                GROUPS, GROUPS_PADDED, OF_GROUP_PADDED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "first_live"])
def choose_kernel(
    bias_ptr, expert_bias_ptr, live_ptr, first_live, scaling, partial_ptr, arrivals_ptr,
    row_bits_ptr, ids_ptr, weights_ptr, experts_ptr, bits_ptr, weight_of_ptr, count_ptr, rows,
    EXPERTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    EXPERT_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_EXPERT_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LIVE: tl.constexpr, SIGMOID: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The choice behind :func:`router_kernel`. A program has ``CHUNK`` rows, and the last to come
    lists the experts. ``row_bits_ptr`` is to int64, one for each padded expert and one behind them:
    zeros, before and after."""
    pdl_enter(PDL)
    COLUMNS: tl.constexpr = GROUPS_PADDED * OF_GROUP_PADDED
    bits, live = choose_rows(
        tl.program_id(0) * CHUNK, partial_ptr, bias_ptr, expert_bias_ptr, live_ptr, first_live,
        scaling, ids_ptr, weights_ptr, weight_of_ptr, rows,
        EXPERTS, FIRST, HELD, TOP_K, SHARED, ROWS, CHUNK, SPLITS, EXPERT_BLOCKS, HAS_BIAS,
        HAS_EXPERT_BIAS, HAS_GATE, HAS_LIVE, SIGMOID, PRE_SOFTMAX, NORMALIZE, GROUPS, KEPT, SUMMED,
        GROUPS_PADDED, OF_GROUP_PADDED, PLACES,
    )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    tl.atomic_or(row_bits_ptr + column, bits, mask=bits != 0, sem="relaxed")
    if SHARED:
        tl.atomic_or(row_bits_ptr + COLUMNS, live, sem="relaxed")
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == ROWS // CHUNK - 1:
        tl.store(arrivals_ptr, 0)  # for the next launch, as are these
        bits = tl.atomic_xchg(row_bits_ptr + column, tl.zeros([COLUMNS], tl.int64), sem="relaxed")
        live = tl.full([], 0, tl.int64)
        if SHARED:
            live = tl.atomic_xchg(row_bits_ptr + COLUMNS, live, sem="relaxed")
        list_experts(
            bits, live, experts_ptr, bits_ptr, count_ptr, EXPERTS, FIRST, HELD, SHARED, GROUPS,
            GROUPS_PADDED, OF_GROUP_PADDED,
        )  # fmt: skip
