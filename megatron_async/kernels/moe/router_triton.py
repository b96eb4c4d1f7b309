"""The router of a decode step in one Triton kernel: norm, logits, choice, and which row needs which
expert.

Programs take experts by a slice of the hidden size each, and leave partial logits. The last to come
adds them up in order, so the sums are the same in every run, chooses the experts of all rows, and
writes what the GEMMs read: which experts have rows, which these are, and their weights.

Of more rows than a decode step's kernels take a program has some, with all experts.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.moe.reference import Routing
from megatron_async.kernels.moe.settings import SIGMOID, RouterSettings
from megatron_async.kernels.pdl import pdl_enter, uses_pdl

BLOCK_E = tl.constexpr(16)
"""Experts of a program."""
GATE_PLACES = tl.constexpr(4)
"""Floats behind a row's partial logits, the first of them that of the shared experts' gate: rows
begin at 16 bytes."""
_STATISTICS = tl.constexpr(4096)
"""Partial statistics, of all rows together, that are on their way at once."""
_FEW_ROWS, _FEW_COLUMNS = 4096, 128
"""A program chooses for 32 rows if there are more rows than the first and no more columns than the
second, else for 16."""
_LOWEST = tl.constexpr(-(2**31) + 1)
_TAKEN = tl.constexpr(-(2**63))


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


@triton.jit
def _keys(values, column, valid, COLUMNS: tl.constexpr):
    """int64 that order as values do, NaN highest; of equal values the first column is highest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values == values, ordered, 0x7FFFFFFF)
    ordered = tl.where(valid, ordered, _LOWEST).to(tl.int64)
    return ordered * 0x100000000 + (COLUMNS - 1 - column)


@triton.jit
def _added_up(partial_ptr, stride, mask, SPLITS: tl.constexpr):
    """Sum over splits, in order. Unrolled, the loads are on their way together."""
    total = tl.load(partial_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + s * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


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
def _columns(
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
def _chosen(
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
    PDL: tl.constexpr,
):  # fmt: skip
    """See :class:`~.decode.MoeDecode`. The grid is ``EXPERT_BLOCKS * SPLITS``.

    Of partial logits a split has ``[ROWS, WIDTH]``: the experts', and that of the shared experts'
    gate. ``BLOCK_H`` elements of the hidden size are a program's. ``CHUNK`` rows are chosen for at
    once. What is written counts experts from ``FIRST`` on,
    and leaves out all but ``HELD`` of them.
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

    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == EXPERT_BLOCKS * SPLITS - 1:
        tl.store(arrivals_ptr, 0)  # for the next launch
        COLUMNS: tl.constexpr = GROUPS_PADDED * OF_GROUP_PADDED
        SLOTS: tl.constexpr = TOP_K + SHARED
        c, e, valid = _columns(EXPERTS, GROUPS, GROUPS_PADDED, OF_GROUP_PADDED)
        own = e - FIRST
        is_held = (own >= 0) & (own < HELD)  # of those that are chosen
        place = tl.arange(0, PLACES)
        bits = tl.zeros([COLUMNS], tl.int64)  # which rows an expert has
        live_bits = tl.zeros([CHUNK], tl.int64)
        for first in range(0, ROWS, CHUNK):
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
            ranks, weights = _chosen(
                logits, c, e, valid, expert_bias_ptr, scaling, CHUNK, HAS_EXPERT_BIAS, SIGMOID,
                PRE_SOFTMAX, NORMALIZE, TOP_K, GROUPS, KEPT, SUMMED, GROUPS_PADDED,
                OF_GROUP_PADDED,
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
            weights = tl.where(is_shared, of_shared[:, None], 0.0)
            slot = t[:, None] * SLOTS + place[None, :]
            tl.store(ids_ptr + slot, ids, mask=is_shared | is_dead)
            tl.store(weights_ptr + slot, weights, mask=is_shared | is_dead)
            if SHARED:
                tl.store(weight_of_ptr + ids * ROWS + t[:, None], weights, mask=is_shared)
            row_bit = tl.where(live, tl.full([CHUNK], 1, tl.int64) << t.to(tl.int64), 0)
            bits |= tl.sum(tl.where(is_chosen, row_bit[:, None], 0), 0)
            live_bits |= row_bit
        needed = (bits != 0).to(tl.int32)
        number = tl.cumsum(needed, 0) - needed
        tl.store(experts_ptr + number, own, mask=needed > 0)
        tl.store(bits_ptr + number, bits, mask=needed > 0)
        count = tl.sum(needed, 0)
        all_live = tl.sum(live_bits, 0)
        for i in tl.static_range(SHARED):
            tl.store(experts_ptr + count + i, HELD + i)
            tl.store(bits_ptr + count + i, all_live)
        tl.store(count_ptr, count + (all_live != 0).to(tl.int32) * SHARED)


@triton.jit(do_not_specialize=["rows"])
def wide_router_kernel(
    x_ptr, weight_ptr, bias_ptr, expert_bias_ptr, live_ptr, scaling, ids_ptr, weights_ptr, rows,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_EXPERT_BIAS: tl.constexpr,
    HAS_LIVE: tl.constexpr, SIGMOID: tl.constexpr, PRE_SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SUMMED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, OF_GROUP_PADDED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """:func:`~.reference.route` of ``BLOCK_T`` rows; ``live_ptr`` is to bytes."""
    pdl_enter(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = t < rows
    c, e, valid = _columns(EXPERTS, GROUPS, GROUPS_PADDED, OF_GROUP_PADDED)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    w_ptrs = weight_ptr + e[:, None] * HIDDEN + k[None, :]
    logits = tl.zeros([BLOCK_T, GROUPS_PADDED * OF_GROUP_PADDED], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        in_k = (start + k < HIDDEN)[None, :]
        x = tl.load(x_ptrs + start, mask=in_rows[:, None] & in_k, other=0.0)
        w = tl.load(w_ptrs + start, mask=valid[:, None] & in_k, other=0.0)
        logits = tl.dot(x, tl.trans(w), logits, input_precision=PRECISION)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)[None, :]
    ranks, weights = _chosen(
        logits, c, e, valid, expert_bias_ptr, scaling, BLOCK_T, HAS_EXPERT_BIAS, SIGMOID,
        PRE_SOFTMAX, NORMALIZE, TOP_K, GROUPS, KEPT, SUMMED, GROUPS_PADDED, OF_GROUP_PADDED,
    )  # fmt: skip
    ids = tl.broadcast_to(e[None, :], ranks.shape)
    if HAS_LIVE:
        live = tl.load(live_ptr + t, mask=in_rows, other=0) != 0
        ids = tl.where(live[:, None], ids, -1)
        weights = tl.where(live[:, None], weights, 0.0)
    slot = t[:, None] * TOP_K + ranks
    is_chosen = (ranks < TOP_K) & in_rows[:, None]
    tl.store(ids_ptr + slot, ids, mask=is_chosen)
    tl.store(weights_ptr + slot, weights, mask=is_chosen)


def route_many(
    hidden: Tensor,
    weight: Tensor,
    settings: RouterSettings,
    *,
    bias: Tensor | None = None,
    expert_bias: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    """:func:`~.reference.route` by the logits of ``hidden [T, H]``, which are not written.

    Args:
        weight: ``[experts, H]``, contiguous and of the dtype of ``hidden``.
        bias: ``[experts]``.
        expert_bias: fp32 ``[experts]``.
        live: bool ``[T]``.
    """
    (rows, size), top_k = hidden.shape, settings.top_k
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=hidden.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=hidden.device)
    groups, pdl = settings.num_groups, uses_pdl(hidden.device)
    of_group = triton.next_power_of_2(settings.num_experts // groups)
    columns = triton.next_power_of_2(groups) * of_group
    block = 16 if rows <= _FEW_ROWS or columns > _FEW_COLUMNS else 32
    is_live = ids if live is None else live.contiguous().view(torch.uint8)
    wide_router_kernel[(triton.cdiv(rows, block),)](
        hidden, weight, weight if bias is None else bias,
        weights if expert_bias is None else expert_bias, is_live, settings.scaling_factor, ids,
        weights, rows, HIDDEN=size, EXPERTS=settings.num_experts, TOP_K=top_k, BLOCK_T=block,
        BLOCK_K=64 if columns <= 2 * _FEW_COLUMNS else 32, HAS_BIAS=bias is not None,
        HAS_EXPERT_BIAS=expert_bias is not None, HAS_LIVE=live is not None,
        SIGMOID=settings.score_function == SIGMOID, PRE_SOFTMAX=settings.pre_softmax,
        NORMALIZE=settings.normalize, GROUPS=groups, KEPT=settings.kept_groups,
        SUMMED=settings.group_score_experts, GROUPS_PADDED=columns // of_group,
        OF_GROUP_PADDED=of_group, PDL=pdl, launch_pdl=pdl, num_warps=8, num_stages=3,
        PRECISION="ieee" if hidden.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    return Routing(ids, weights)
