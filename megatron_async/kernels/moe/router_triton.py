"""The router of a decode step in one Triton kernel: norm, logits, choice, and who needs whom.

Programs take experts by a slice of the hidden size each, and leave partial logits. The last to come
adds them up in order, so the sums are the same in every run, chooses the experts of all rows, and
writes what the GEMMs read: which experts have rows, which these are, and their weights.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.pdl import pdl_enter

BLOCK_E = tl.constexpr(16)
"""Experts of a program."""
BLOCK_H = tl.constexpr(256)
"""Elements of the hidden size of a program."""
_ROWS = tl.constexpr(16)
"""Rows that are chosen for at once."""
_STATISTICS = tl.constexpr(32)
_LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _row_scale(
    statistics_ptr, row, in_rows, tiles, eps,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of each row, from its producer's partial statistics."""
    mean = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, _STATISTICS):
        tile = first + tl.arange(0, _STATISTICS)
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


@triton.jit
def _keys(values, columns, valid, BLOCK_C: tl.constexpr):
    """int64 that order as values do, NaN highest; of equal values the first column is highest."""
    values = tl.where(values == values, values + 0.0, float("nan"))
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values == values, ordered, 0x7FFFFFFF)
    ordered = tl.where(valid, ordered, _LOWEST_KEY).to(tl.int64)
    return ordered * 0x100000000 + (BLOCK_C - 1 - columns)


@triton.jit
def _kept_groups(
    choice, column, valid, GROUPS: tl.constexpr, OF_GROUP: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """bool ``[_ROWS, columns]``: those of the groups with the highest scores."""
    BLOCK_C: tl.constexpr = GROUPS_PADDED * OF_GROUP_PADDED
    keys = _keys(choice, column[None, :], valid[None, :], BLOCK_C)
    keys = tl.reshape(keys, [_ROWS, GROUPS_PADDED, OF_GROUP_PADDED])
    values = tl.reshape(choice, [_ROWS, GROUPS_PADDED, OF_GROUP_PADDED])
    score = tl.zeros([_ROWS, GROUPS_PADDED], tl.float32)
    for _ in range(SUMMED):
        best = tl.max(keys, 2)
        is_best = keys == best[:, :, None]
        score += tl.sum(tl.where(is_best, values, 0.0), 2)
        keys = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, keys)
    group = tl.arange(0, GROUPS_PADDED)
    order = _keys(score, group[None, :], (group < GROUPS)[None, :], GROUPS_PADDED)
    kept = tl.zeros([_ROWS, GROUPS_PADDED], tl.int32)
    for _ in range(KEPT):
        is_best = order == tl.max(order, 1)[:, None]
        kept = tl.where(is_best, 1, kept)
        order = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, order)
    kept = tl.broadcast_to(kept[:, :, None], [_ROWS, GROUPS_PADDED, OF_GROUP_PADDED])
    return tl.reshape(kept, [_ROWS, BLOCK_C]) > 0


@triton.jit(do_not_specialize=["rows", "tiles", "first_live"])
def router_kernel(
    hidden_ptr, norm_weight_ptr, norm_bias_ptr, statistics_ptr, tiles, eps, weight_ptr, bias_ptr,
    expert_bias_ptr, gate_ptr, live_ptr, first_live, scaling, normed_ptr, partial_ptr, arrivals_ptr,
    ids_ptr, weights_ptr, experts_ptr, bits_ptr, weight_of_ptr, count_ptr, rows,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, EXPERT_BLOCKS: tl.constexpr, CENTER: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_EXPERT_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LIVE: tl.constexpr, SIGMOID: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
    PLACES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See :class:`~.decode.MoeDecode`. The grid is ``EXPERT_BLOCKS * SPLITS``."""
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
    mean, scale = _row_scale(statistics_ptr, row, in_rows, tiles, eps, HIDDEN, ROWS, CENTER)
    at = row[:, None] * HIDDEN + column[None, :]
    mask = in_rows[:, None] & in_hidden[None, :]
    x = tl.load(hidden_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if CENTER:
        x -= mean[:, None]
    x = x * scale[:, None] * norm_weight[None, :]
    if HAS_NORM_BIAS:
        x += tl.load(norm_bias_ptr + column, mask=in_hidden, other=0.0).to(tl.float32)[None, :]
    normed = tl.where(mask, x, 0.0).to(normed_ptr.dtype.element_ty)
    logits = tl.dot(normed, tl.trans(weight), input_precision=PRECISION)
    # Of a split [ROWS, WIDTH]: the experts' partial logits, and that of the shared experts' gate.
    WIDTH: tl.constexpr = EXPERT_BLOCKS * BLOCK_E + 1
    partial_at = partial_ptr + (split * ROWS + row) * WIDTH
    tl.store(partial_at[:, None] + expert[None, :], logits, mask=in_rows[:, None])
    if block == 0:
        tl.store(normed_ptr + at, normed, mask=mask)
        if HAS_GATE:
            gate = tl.load(gate_ptr + column, mask=in_hidden, other=0.0).to(tl.float32)
            of_gate = tl.sum(normed.to(tl.float32) * gate[None, :], 1)
            tl.store(partial_at + WIDTH - 1, of_gate, mask=in_rows)

    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == EXPERT_BLOCKS * SPLITS - 1:
        tl.store(arrivals_ptr, 0)  # for the next launch
        BLOCK_C: tl.constexpr = GROUPS_PADDED * OF_GROUP_PADDED
        OF_GROUP: tl.constexpr = EXPERTS // GROUPS
        SLOTS: tl.constexpr = TOP_K + SHARED
        # Columns are experts, the first of a group at a multiple of OF_GROUP_PADDED.
        c = tl.arange(0, BLOCK_C)
        group, inside = c // OF_GROUP_PADDED, c % OF_GROUP_PADDED
        e = group * OF_GROUP + inside
        valid = (group < GROUPS) & (inside < OF_GROUP)
        place = tl.arange(0, PLACES)
        bits = tl.zeros([BLOCK_C], tl.int64)  # which rows an expert has
        all_live = tl.zeros([_ROWS], tl.int64)
        for first in range(0, ROWS, _ROWS):
            t = first + tl.arange(0, _ROWS)
            live = t < rows
            if HAS_LIVE:
                live = live & (tl.load(live_ptr + t, mask=live, other=0) >= first_live)
            of_expert = tl.zeros([_ROWS, BLOCK_C], tl.float32)
            for s in range(SPLITS):
                from_split = partial_ptr + (s * ROWS + t) * WIDTH
                of_expert += tl.load(
                    from_split[:, None] + e[None, :],
                    mask=live[:, None] & valid[None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
            if HAS_BIAS:
                of_expert += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)[None, :]
            scores = of_expert
            if SIGMOID:
                scores = 1.0 / (1.0 + tl.exp(-of_expert))
            elif PRE_SOFTMAX:
                shown = tl.where(valid[None, :], of_expert, float("-inf"))
                scores = tl.exp(shown - tl.max(shown, 1)[:, None])
                scores = scores / tl.sum(scores, 1)[:, None]
            choice = scores
            if HAS_EXPERT_BIAS:
                choice += tl.load(expert_bias_ptr + e, mask=valid, other=0.0)[None, :]
            if KEPT < GROUPS:
                kept = _kept_groups(
                    choice, c, valid, GROUPS, OF_GROUP, KEPT, SUMMED, GROUPS_PADDED,
                    OF_GROUP_PADDED,
                )  # fmt: skip
                choice = tl.where(kept, choice, float("-inf"))
            keys = _keys(choice, c[None, :], valid[None, :], BLOCK_C)
            is_chosen = tl.zeros([_ROWS, BLOCK_C], tl.int32)
            chosen_ids = tl.full([_ROWS, PLACES], -1, tl.int32)
            chosen = tl.full([_ROWS, PLACES], float("-inf"), tl.float32)
            for j in range(TOP_K):
                best = tl.max(keys, 1)
                is_best = keys == best[:, None]
                is_chosen = tl.where(is_best & live[:, None], 1, is_chosen)
                best_score = tl.sum(tl.where(is_best, scores, 0.0), 1)
                at_column = BLOCK_C - 1 - (best & 0x7FFFFFFF).to(tl.int32)
                best_id = at_column // OF_GROUP_PADDED * OF_GROUP + at_column % OF_GROUP_PADDED
                at_place = place[None, :] == j
                chosen = tl.where(at_place, best_score[:, None], chosen)
                chosen_ids = tl.where(at_place, best_id[:, None], chosen_ids)
                keys = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, keys)
            routed = (place < TOP_K)[None, :]
            if SIGMOID or PRE_SOFTMAX:
                chosen = tl.where(routed, chosen, 0.0)
            else:
                chosen = tl.exp(chosen - tl.max(chosen, 1)[:, None])
                chosen = chosen / tl.sum(chosen, 1)[:, None]
            if NORMALIZE:
                chosen = chosen / (tl.sum(chosen, 1) + 1e-20)[:, None]
            chosen = chosen * scaling
            if SHARED:
                of_shared = tl.full([_ROWS], 1.0, tl.float32)
                if HAS_GATE:
                    gate_logit = tl.zeros([_ROWS], tl.float32)
                    for s in range(SPLITS):
                        gate_logit += tl.load(
                            partial_ptr + (s * ROWS + t) * WIDTH + WIDTH - 1,
                            mask=live, other=0.0, cache_modifier=".cg",
                        )  # fmt: skip
                    of_shared = 1.0 / (1.0 + tl.exp(-gate_logit))
                chosen = tl.where(routed, chosen, of_shared[:, None])
                shared_ids = EXPERTS + place - TOP_K
                chosen_ids = tl.where(routed, chosen_ids, shared_ids[None, :])
            to = t[:, None] * SLOTS + place[None, :]
            is_slot = (t < rows)[:, None] & (place < SLOTS)[None, :]
            tl.store(ids_ptr + to, tl.where(live[:, None], chosen_ids, -1), mask=is_slot)
            tl.store(weights_ptr + to, tl.where(live[:, None], chosen, 0.0), mask=is_slot)
            tl.store(
                weight_of_ptr + chosen_ids * ROWS + t[:, None],
                chosen, mask=live[:, None] & (place < SLOTS)[None, :],
            )  # fmt: skip
            row_bit = tl.full([_ROWS], 1, tl.int64) << t.to(tl.int64)
            bits |= tl.sum(tl.where(is_chosen > 0, row_bit[:, None], 0), 0)
            all_live |= tl.where(live, row_bit, 0)
        needed = (bits != 0).to(tl.int32)
        number = tl.cumsum(needed, 0) - needed
        tl.store(experts_ptr + number, e, mask=needed > 0)
        tl.store(bits_ptr + number, bits, mask=needed > 0)
        count = tl.sum(needed, 0)
        of_all = tl.sum(all_live, 0)
        for i in tl.static_range(SHARED):
            tl.store(experts_ptr + count + i, EXPERTS + i)
            tl.store(bits_ptr + count + i, of_all)
        tl.store(count_ptr, count + (of_all != 0).to(tl.int32) * SHARED)
