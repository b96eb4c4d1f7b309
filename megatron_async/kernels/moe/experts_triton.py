"""The grouped GEMMs of a decode step's experts, as two Triton kernels.

Both have few rows and stream weights: an expert's rows are found in a tile of all rows of the step,
of which the others are neither read nor written, so each weight is read once. Programs that share
an SM fill the gaps between each other's loads.

In the first a program has some columns of one expert. In the second it has some columns of the
output and goes through all experts that have rows, so a token's experts are added up in its
accumulators, in their order. Programs may share the inner dimension; the last to come adds up what
they have, in order. So results are the same in every run, and a row's do not depend on the others.

Weights may be e4m3. They are widened in registers, which rounds nothing, and the sum over columns
that share a scale is multiplied by it, in fp32. Or MXFP4, eight numbers in a word of 32 bits: these
are widened with their scales, which rounds nothing either (``mxfp4_triton.py``).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.moe.mxfp4_triton import MISSING, mxfp4_factors, widen_mxfp4
from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.register_operands import ended


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def at_least(x, low):
    """The larger one. GPUs' own maximum of NaN and a number is the number: here NaN stays."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """The smaller one; NaN stays."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """See :class:`~.settings.ExpertActivation`. NaN stays."""
    if FUNCTION == "silu":
        out = x / (1.0 + tl.exp(-x))
    elif FUNCTION == "quick_gelu":
        out = x / (1.0 + tl.exp(-1.702 * x))
    elif FUNCTION == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        out = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "squared_relu":
        positive = at_least(x, 0.0)
        out = positive * positive
    else:
        out = at_least(x, 0.0)
    return out


@triton.jit
def _has_row(bits, t):
    """Whether an expert has row ``t``; its bits are an int64."""
    return (bits >> t.to(tl.int64)) & 1 > 0


@triton.jit
def multiply(
    x, w, total, SWAP: tl.constexpr, PRECISION: tl.constexpr, WIDENED: tl.constexpr = False
):  # fmt: skip
    """``total + x w^T``, or its transpose: with the weight first, 64 of its rows fill a wgmma.
    ``WIDENED``: the weight was made in registers."""
    if SWAP:
        total = tl.dot(w, tl.trans(x), total, input_precision=PRECISION)
        if WIDENED:
            total = ended(total)
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    return total


@triton.jit
def multiply_e4m3(x, w, scale, total, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`multiply` with e4m3 ``w``, whose rows have a ``scale`` each."""
    w = w.to(x.dtype)
    if SWAP:
        total += tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale[:, None]
    else:
        total += tl.dot(x, tl.trans(w), input_precision=PRECISION) * scale[None, :]
    return total


@triton.jit
def _up_scales(
    scale_ptr, shared_scale_ptr, expert, row, mask, column,
    HIDDEN: tl.constexpr, FIRST: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
    SHARED: tl.constexpr, COLUMNS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales of rows ``row`` of an expert's first weight, which has ``FIRST`` rows, at a column."""
    GROUPS: tl.constexpr = HIDDEN // COLUMNS
    ptrs = scale_ptr + (expert.to(tl.int64) * FIRST + row) * GROUPS + column // COLUMNS
    if SHARED:
        of_shared = shared_scale_ptr + ((expert - EXPERTS) * INNER + row) * (
            HIDDEN // SHARED_COLUMNS
        )
        ptrs = tl.where(expert >= EXPERTS, of_shared + column // SHARED_COLUMNS, ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _down_scales(
    scale_ptr, shared_scale_ptr, expert, row, mask, column,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, SHARED: tl.constexpr,
    COLUMNS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales of rows ``row`` of an expert's second weight at a column, or at its last one."""
    GROUPS: tl.constexpr = INNER // COLUMNS
    column = tl.minimum(column, INNER - 1)
    ptrs = scale_ptr + (expert.to(tl.int64) * HIDDEN + row) * GROUPS + column // COLUMNS
    if SHARED:
        column += (expert - EXPERTS) * INNER
        of_shared = shared_scale_ptr + row * (SHARED * INNER // SHARED_COLUMNS)
        ptrs = tl.where(expert >= EXPERTS, of_shared + column // SHARED_COLUMNS, ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def up_kernel(
    x_ptr, w_ptr, bias_ptr, shared_ptr, experts_ptr, bits_ptr, weight_of_ptr, count_ptr, out_ptr,
    scale_ptr, shared_scale_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr, GATED: tl.constexpr, FUNCTION: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, NUM_STAGES: tl.constexpr, E4M3: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr, MXFP4: tl.constexpr = False,
):  # fmt: skip
    """Activated first linear layer of each needed expert, times the routing weight.

    The grid is ``BLOCKS`` times the most experts that may have rows. ``BLOCK_N`` rows of the weight
    are a program's; gated, they are pairs of a row of the gate and one of the other half.
    """
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_enter(PDL)
    # What lies behind the list is an older one, so all three can be read together.
    count = tl.load(count_ptr)
    expert = tl.load(experts_ptr + number)
    bits = tl.load(bits_ptr + number)
    if number >= count:
        return
    t = tl.arange(0, ROWS)
    has_row = _has_row(bits, t)
    weight = tl.load(weight_of_ptr + expert * ROWS + t, mask=has_row, other=0.0)

    n = tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = 2 if GATED else 1
    PACK: tl.constexpr = 8 if MXFP4 else 1  # numbers of what is loaded at once
    WIDTH: tl.constexpr = HIDDEN // PACK
    base = w_ptr + expert.to(tl.int64) * (PARTS * INNER * WIDTH)
    half: tl.constexpr = INNER
    first_row = n % PARTS * half
    if SHARED:  # one linear layer over all shared experts
        is_shared = expert >= EXPERTS
        of_shared = (expert - EXPERTS) * (INNER * HIDDEN)
        base = tl.where(is_shared, shared_ptr + of_shared, base)
        first_row = n % PARTS * tl.where(is_shared, SHARED * INNER, half)
    i = block * (BLOCK_N // PARTS) + n // PARTS
    in_weight = i < INNER
    k = tl.arange(0, BLOCK_K)
    of_k = tl.arange(0, BLOCK_K // PACK)
    w_ptrs = base + (first_row + i)[:, None] * WIDTH + of_k[None, :]
    x_ptrs = x_ptr + t[:, None] * HIDDEN + k[None, :]
    total = tl.zeros([BLOCK_N, ROWS] if SWAP else [ROWS, BLOCK_N], tl.float32)
    OF_GROUPS: tl.constexpr = COLUMNS < HIDDEN or (SHARED > 0 and SHARED_COLUMNS < HIDDEN)
    if E4M3:
        scale = _up_scales(
            scale_ptr, shared_scale_ptr, expert, first_row + i, in_weight, 0, HIDDEN,
            PARTS * INNER, INNER, EXPERTS, SHARED, COLUMNS, SHARED_COLUMNS,
        )  # fmt: skip
    if MXFP4:
        tl.static_assert(SHARED == 0)
        row = expert.to(tl.int64) * (PARTS * INNER) + first_row + i
        factor = mxfp4_factors(scale_ptr, row, in_weight, of_k, WIDTH)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=NUM_STAGES):
        if HIDDEN % BLOCK_K == 0 and INNER % (BLOCK_N // PARTS) == 0:
            x = tl.load(x_ptrs + start, mask=has_row[:, None], other=0.0)
            w = tl.load(w_ptrs + start // PACK)
        else:
            in_k = start + k < HIDDEN
            x = tl.load(x_ptrs + start, mask=has_row[:, None] & in_k[None, :], other=0.0)
            in_row = start // PACK + of_k < WIDTH
            w = tl.load(
                w_ptrs + start // PACK, mask=in_weight[:, None] & in_row[None, :], other=0.0
            )
        if MXFP4:
            w = widen_mxfp4(w, factor, BLOCK_N, BLOCK_K)
            # One step ahead, as the next product needs it.
            factor = mxfp4_factors(
                scale_ptr, row, in_weight, (start + BLOCK_K) // PACK + of_k, WIDTH
            )
        if E4M3 and OF_GROUPS:
            total = multiply_e4m3(x, w, scale, total, SWAP, PRECISION)
            # One step ahead, as the next product needs it.
            scale = _up_scales(
                scale_ptr, shared_scale_ptr, expert, first_row + i, in_weight,
                tl.minimum(start + BLOCK_K, HIDDEN - 1), HIDDEN, PARTS * INNER, INNER, EXPERTS,
                SHARED, COLUMNS, SHARED_COLUMNS,
            )  # fmt: skip
        else:
            total = multiply(x, w.to(x.dtype), total, SWAP, PRECISION, E4M3 or MXFP4)
    if SWAP:
        total = tl.trans(total)
    if E4M3 and not OF_GROUPS:
        total *= scale[None, :]
    if MXFP4:
        total *= MISSING
    if HAS_BIAS:
        of_expert = bias_ptr + expert * (PARTS * INNER) + first_row + i
        total += tl.load(of_expert, mask=in_weight & (expert < EXPERTS), other=0.0).to(tl.float32)[
            None, :
        ]
    column = block * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
    if GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS, BLOCK_N // 2, 2]))
        if LIMIT is not None:
            gate = at_most(gate, LIMIT)
            up = at_most(at_least(up, -LIMIT), LIMIT)
        out = activate(gate, FUNCTION) * (up + OFFSET)
    else:
        if LIMIT is not None:
            total = at_most(total, LIMIT)
        out = activate(total, FUNCTION)
    out = out * weight[:, None]
    tl.store(
        out_ptr + (number * ROWS + t)[:, None] * INNER + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=has_row[:, None] & (column < INNER)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def down_kernel(
    x_ptr, w_ptr, bias_ptr, shared_ptr, experts_ptr, bits_ptr, count_ptr, ids_ptr, weights_ptr,
    partial_ptr, arrivals_ptr, residual_ptr, out_ptr, statistics_ptr, next_weight_ptr, scaled_ptr,
    rows, scale_ptr, shared_scale_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    STATISTICS: tl.constexpr, CENTER: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, NUM_STAGES: tl.constexpr, E4M3: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr, MXFP4: tl.constexpr = False,
):  # fmt: skip
    """Second linear layer of each needed expert, added up over the experts of each row and to the
    residual stream, whose partial statistics it emits.

    The grid is ``HIDDEN / BLOCK_N * SPLITS``, and ``SPLITS`` programs share the inner dimension.
    """
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    # Steps of BLOCK_K that a split has of each expert; all have as many, the last may be empty.
    STEPS: tl.constexpr = (INNER + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    EVEN: tl.constexpr = INNER % (BLOCK_K * SPLITS) == 0
    PACK: tl.constexpr = 8 if MXFP4 else 1  # numbers of what is loaded at once
    WIDTH: tl.constexpr = INNER // PACK
    pdl_enter(PDL)
    count = tl.load(count_ptr)
    last = tl.maximum(count - 1, 0)
    t = tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    of_k = tl.arange(0, BLOCK_K // PACK)
    column = block * BLOCK_N + n
    # One step ahead of the loads that need them.
    expert = tl.load(experts_ptr)
    bits = tl.load(bits_ptr)
    total = tl.zeros([BLOCK_N, ROWS] if SWAP else [ROWS, BLOCK_N], tl.float32)
    if E4M3:
        scale = _down_scales(
            scale_ptr, shared_scale_ptr, expert, column, column < HIDDEN, split * STEPS * BLOCK_K,
            HIDDEN, INNER, EXPERTS, SHARED, COLUMNS, SHARED_COLUMNS,
        )  # fmt: skip
    if MXFP4:
        tl.static_assert(SHARED == 0)
        factor = mxfp4_factors(
            scale_ptr, expert.to(tl.int64) * HIDDEN + column, column < HIDDEN,
            split * STEPS * (BLOCK_K // PACK) + of_k, WIDTH,
        )  # fmt: skip
    for step in tl.range(0, count * STEPS, num_stages=NUM_STAGES):
        first = (split * STEPS + step % STEPS) * BLOCK_K
        inside, of_row = first + k, first // PACK + of_k
        if SHARED:
            is_shared = expert >= EXPERTS
            routed = w_ptr + expert.to(tl.int64) * (HIDDEN * INNER)
            base = tl.where(is_shared, shared_ptr + (expert - EXPERTS) * INNER, routed)
            stride = tl.where(is_shared, SHARED * INNER, INNER)
        else:
            base = w_ptr + expert.to(tl.int64) * (HIDDEN * WIDTH)
            stride = WIDTH
        w_ptrs = base + column[:, None] * stride + of_row[None, :]
        has_row = _has_row(bits, t)
        x_ptrs = x_ptr + (step // STEPS * ROWS + t)[:, None] * INNER + inside[None, :]
        if EVEN:
            x = tl.load(x_ptrs, mask=has_row[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            in_k = inside < INNER
            x = tl.load(x_ptrs, mask=has_row[:, None] & in_k[None, :], other=0.0)
            in_row = of_row < WIDTH
            w = tl.load(w_ptrs, mask=in_row[None, :] & (column < HIDDEN)[:, None], other=0.0)
        if MXFP4:
            w = widen_mxfp4(w, factor, BLOCK_N, BLOCK_K)
        if E4M3:
            total = multiply_e4m3(x, w, scale, total, SWAP, PRECISION)
        else:
            total = multiply(x, w.to(x.dtype), total, SWAP, PRECISION, E4M3 or MXFP4)
        next_number = tl.minimum((step + 1) // STEPS, last)
        expert = tl.load(experts_ptr + next_number)
        bits = tl.load(bits_ptr + next_number)
        if E4M3:
            scale = _down_scales(
                scale_ptr, shared_scale_ptr, expert, column, column < HIDDEN,
                (split * STEPS + (step + 1) % STEPS) * BLOCK_K, HIDDEN, INNER, EXPERTS, SHARED,
                COLUMNS, SHARED_COLUMNS,
            )  # fmt: skip
        if MXFP4:
            factor = mxfp4_factors(
                scale_ptr, expert.to(tl.int64) * HIDDEN + column, column < HIDDEN,
                (split * STEPS + (step + 1) % STEPS) * (BLOCK_K // PACK) + of_k, WIDTH,
            )  # fmt: skip
    if SWAP:
        total = tl.trans(total)
    if MXFP4:
        total *= MISSING

    in_rows = t < rows
    mask = in_rows[:, None] & (column < HIDDEN)[None, :]
    at = t[:, None] * HIDDEN + column[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(partial_ptr + split * ROWS * HIDDEN + at, total, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel")
        tl.debug_barrier()
        is_last = arrived == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.store(arrivals_ptr + block, 0)  # for the next launch
            total = tl.zeros([ROWS, BLOCK_N], tl.float32)
            for s in tl.static_range(SPLITS):
                total += tl.load(
                    partial_ptr + s * ROWS * HIDDEN + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
        if HAS_BIAS:
            for place in tl.static_range(SLOTS - SHARED):
                chosen = tl.load(ids_ptr + t * SLOTS + place, mask=in_rows, other=-1)
                weight = tl.load(weights_ptr + t * SLOTS + place, mask=in_rows, other=0.0)
                bias = tl.load(
                    bias_ptr + chosen[:, None] * HIDDEN + column[None, :],
                    mask=mask & (chosen >= 0)[:, None], other=0.0,
                )  # fmt: skip
                total += weight[:, None] * bias.to(tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rounded, mask=mask)
        if STATISTICS:
            total = rounded.to(tl.float32)
            mean = tl.zeros([ROWS], tl.float32)
            if CENTER:
                mean = tl.sum(total, 1) / BLOCK_N
                deviation = total - mean[:, None]
                square = tl.sum(deviation * deviation, 1)
            else:
                square = tl.sum(total * total, 1)
                weight = tl.load(next_weight_ptr + column).to(tl.float32)
                scaled = (total * weight[None, :]).to(scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + at, scaled, mask=mask)
            into = statistics_ptr + (t * (HIDDEN // BLOCK_N) + block) * 2
            tl.store(into, mean, mask=in_rows)
            tl.store(into + 1, square, mask=in_rows)
