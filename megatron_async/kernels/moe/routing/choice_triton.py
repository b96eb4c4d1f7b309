"""How a router of experts chooses among logits: by score and by group, and which weights the chosen
have."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_E = tl.constexpr(16)
"""Experts of a program that computes logits."""
GATE_PLACES = tl.constexpr(4)
"""Floats behind a row's partial logits, the first of them that of the shared experts' gate: rows
begin at 16 bytes."""
_LOWEST = tl.constexpr(-(2**31) + 1)
_TAKEN = tl.constexpr(-(2**63))


@triton.jit
def _keys(values, column, valid, COLUMNS: tl.constexpr):
    """int64 that order as values do, NaN highest; of equal values the first column is highest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values == values, ordered, 0x7FFFFFFF)
    ordered = tl.where(valid, ordered, _LOWEST).to(tl.int64)
    return ordered * 0x100000000 + (COLUMNS - 1 - column)


@triton.jit
def _in_kept_groups(
    choice, column, valid, CHUNK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """``choice`` with -inf but for the columns of the groups with the highest scores."""
    COLUMNS: tl.constexpr = GROUPS_PADDED * OF_GROUP_PADDED
    keys = _keys(choice, column[None, :], valid[None, :], COLUMNS)
    keys = tl.reshape(keys, [CHUNK, GROUPS_PADDED, OF_GROUP_PADDED])
    values = tl.reshape(choice, [CHUNK, GROUPS_PADDED, OF_GROUP_PADDED])
    score = tl.zeros([CHUNK, GROUPS_PADDED], tl.float32)
    for _ in range(SUMMED):
        is_best = keys == tl.max(keys, 2)[:, :, None]
        score += tl.sum(tl.where(is_best, values, 0.0), 2)
        keys = tl.where(is_best, _TAKEN, keys)
    group = tl.arange(0, GROUPS_PADDED)
    order = _keys(score, group[None, :], (group < GROUPS)[None, :], GROUPS_PADDED)
    for _ in range(KEPT):
        order = tl.where(order == tl.max(order, 1)[:, None], _TAKEN, order)
    kept = tl.broadcast_to(order[:, :, None], [CHUNK, GROUPS_PADDED, OF_GROUP_PADDED]) == _TAKEN
    return tl.where(tl.reshape(kept, [CHUNK, COLUMNS]), choice, float("-inf"))


@triton.jit
def _scores(logits, valid, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr):
    """What weights are made of, of logits ``[rows, columns]``."""
    scores = logits
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif PRE_SOFTMAX:
        shown = tl.where(valid[None, :], logits, float("-inf"))
        scores = tl.exp(shown - tl.max(shown, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    return scores


@triton.jit
def _ranks(keys, TOP_K: tl.constexpr):
    """0 for the best column of each row, 1 for the next, ..., ``TOP_K`` for those not chosen.

    Columns stay where they are: a round is one reduction within a warp."""
    ranks = tl.full(keys.shape, TOP_K, tl.int32)
    for j in tl.static_range(TOP_K):
        is_best = keys == tl.max(keys, 1)[:, None]
        ranks = tl.where(is_best, j, ranks)
        keys = tl.where(is_best, _TAKEN, keys)
    return ranks


@triton.jit
def _weights(scores, is_chosen, scaling, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """Routing weights of the chosen columns of ``scores``; 0 for the others."""
    if SOFTMAX:
        shown = tl.where(is_chosen, scores, float("-inf"))
        weights = tl.exp(shown - tl.max(shown, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    else:
        weights = tl.where(is_chosen, scores, 0.0)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    return weights * scaling


@triton.jit
def columns(
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    OF_GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """Columns, the expert of each, and whether there is one. The first expert of a group is at a
    multiple of ``OF_GROUP_PADDED``."""
    OF_GROUP: tl.constexpr = EXPERTS // GROUPS
    c = tl.arange(0, GROUPS_PADDED * OF_GROUP_PADDED)
    # With one group they are plainly the same, so a warp may have whole rows of logits.
    e, valid = c, c < EXPERTS
    if GROUPS > 1:
        e = c // OF_GROUP_PADDED * OF_GROUP + c % OF_GROUP_PADDED
        valid = (c // OF_GROUP_PADDED < GROUPS) & (c % OF_GROUP_PADDED < OF_GROUP)
    return c, e, valid


@triton.jit
def chosen(
    logits, c, e, valid, expert_bias_ptr, scaling, ROWS: tl.constexpr,
    HAS_EXPERT_BIAS: tl.constexpr, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """Ranks of the columns of each row, see :func:`_ranks`, and the weights of those chosen."""
    scores = _scores(logits, valid, SIGMOID, PRE_SOFTMAX)
    choice = scores
    if HAS_EXPERT_BIAS:
        choice += tl.load(expert_bias_ptr + e, mask=valid, other=0.0)[None, :]
    if KEPT < GROUPS:
        choice = _in_kept_groups(
            choice, c, valid, ROWS, GROUPS, KEPT, SUMMED, GROUPS_PADDED, OF_GROUP_PADDED
        )
    keys = _keys(choice, c[None, :], valid[None, :], GROUPS_PADDED * OF_GROUP_PADDED)
    ranks = _ranks(keys, TOP_K)
    weights = _weights(scores, ranks < TOP_K, scaling, not (SIGMOID or PRE_SOFTMAX), NORMALIZE)
    return ranks, weights


@triton.jit
def _added_up(partial_ptr, stride, mask, SPLITS: tl.constexpr):
    """Sum over splits, in order. Unrolled, the loads are on their way together."""
    total = tl.load(partial_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + s * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def choose_rows(
    first, partial_ptr, bias_ptr, expert_bias_ptr, live_ptr, first_live, scaling, ids_ptr,
    weights_ptr, weight_of_ptr, rows,
    EXPERTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    EXPERT_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_EXPERT_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LIVE: tl.constexpr, SIGMOID: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SUMMED: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Choose for ``CHUNK`` rows from ``first`` on, by their partial logits, and write their ids and
    weights. Returns int64: which of these rows each column has, and which of them live."""
    WIDTH: tl.constexpr = EXPERT_BLOCKS * BLOCK_E + GATE_PLACES
    SLOTS: tl.constexpr = TOP_K + SHARED
    c, e, valid = columns(EXPERTS, GROUPS, GROUPS_PADDED, OF_GROUP_PADDED)
    own = e - FIRST
    is_held = (own >= 0) & (own < HELD)  # of those that are chosen
    place = tl.arange(0, PLACES)
    t = first + tl.arange(0, CHUNK)
    live = t < rows
    if HAS_LIVE:
        live = live & (tl.load(live_ptr + t, mask=live, other=0) >= first_live)
    of_row = partial_ptr + t * WIDTH
    logits = _added_up(
        of_row[:, None] + e[None, :], ROWS * WIDTH, live[:, None] & valid[None, :], SPLITS
    )
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)[None, :]
    ranks, weights = chosen(
        logits, c, e, valid, expert_bias_ptr, scaling, CHUNK, HAS_EXPERT_BIAS, SIGMOID, PRE_SOFTMAX,
        NORMALIZE, TOP_K, GROUPS, KEPT, SUMMED, GROUPS_PADDED, OF_GROUP_PADDED,
    )  # fmt: skip
    is_chosen = (ranks < TOP_K) & live[:, None]
    slot = t[:, None] * SLOTS + ranks
    named = own
    if HELD < EXPERTS:
        named = tl.where(is_held, own, -1)
    tl.store(ids_ptr + slot, tl.broadcast_to(named[None, :], slot.shape), mask=is_chosen)
    tl.store(weights_ptr + slot, weights, mask=is_chosen)
    if HELD < EXPERTS:
        is_chosen = is_chosen & is_held[None, :]
    tl.store(weight_of_ptr + own[None, :] * ROWS + t[:, None], weights, mask=is_chosen)
    of_shared = tl.full([CHUNK], 1.0, tl.float32)
    if HAS_GATE:
        gates = _added_up(of_row + EXPERT_BLOCKS * BLOCK_E, ROWS * WIDTH, live, SPLITS)
        of_shared = 1.0 / (1.0 + tl.exp(-gates))
    # The other places: shared experts, and all of rows that are not live.
    is_shared = live[:, None] & ((place >= TOP_K) & (place < SLOTS))[None, :]
    is_dead = ((t < rows) & (live == 0))[:, None] & (place < SLOTS)[None, :]
    ids = tl.where(is_shared, (HELD + place - TOP_K)[None, :], -1)
    of_place = tl.where(is_shared, of_shared[:, None], 0.0)
    slot = t[:, None] * SLOTS + place[None, :]
    tl.store(ids_ptr + slot, ids, mask=is_shared | is_dead)
    tl.store(weights_ptr + slot, of_place, mask=is_shared | is_dead)
    if SHARED:
        tl.store(weight_of_ptr + ids * ROWS + t[:, None], of_place, mask=is_shared)
    row_bit = tl.where(live, tl.full([CHUNK], 1, tl.int64) << t.to(tl.int64), 0)
    bits = tl.sum(tl.where(is_chosen, row_bit[:, None], 0), 0)
    return bits, tl.sum(row_bit, 0)


@triton.jit
def list_experts(
    bits, all_live, experts_ptr, bits_ptr, count_ptr,
    EXPERTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """Write the experts that have rows, shared ones last, and the rows of each."""
    _, e, _ = columns(EXPERTS, GROUPS, GROUPS_PADDED, OF_GROUP_PADDED)
    needed = (bits != 0).to(tl.int32)
    number = tl.cumsum(needed, 0) - needed
    tl.store(experts_ptr + number, e - FIRST, mask=needed > 0)
    tl.store(bits_ptr + number, bits, mask=needed > 0)
    count = tl.sum(needed, 0)
    for i in tl.static_range(SHARED):
        tl.store(experts_ptr + count + i, HELD + i)
        tl.store(bits_ptr + count + i, all_live)
    tl.store(count_ptr, count + (all_live != 0).to(tl.int32) * SHARED)
