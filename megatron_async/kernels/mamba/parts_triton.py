"""What the Triton kernels of Mamba-2 layers share, and which layers they compute."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.mamba.layer import (
    GatedNorm,
    LayerStates,
    MambaParameters,
    StateRows,
)

NORM_BLOCK = tl.constexpr(2048)
"""Channels that are normed at a time."""

MOST_STATE = 256
"""Elements of a channel's state, which a program holds in registers."""

NO_NORM, NORM_AFTER_GATE, NORM_BEFORE_GATE = range(3)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def step_size(raw, bias, low, high):
    """Softplus, clamped. Of small numbers log(1 + e) is its series: a GPU's logarithm is exact to
    some 2e-7 of 1, which a small step would feel."""
    dt = raw.to(tl.float32) + bias
    e = tl.exp(tl.minimum(dt, 20.0, propagate_nan=tl.PropagateNan.ALL))
    s = tl.minimum(e, 0.0625)
    series = s * (1 - s * (1 / 2 - s * (1 / 3 - s * (1 / 4 - s * (1 / 5 - s * (1 / 6))))))
    log = tl.where(e < 0.0625, series, tl.log(1.0 + e))
    dt = tl.where(dt > 20.0, dt, log)
    # GPUs' own minimum of NaN and a number is the number: here NaN stays, as above.
    dt = tl.maximum(dt, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(dt, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load(ptr, mask, EVEN: tl.constexpr):
    """Zeros outside of the mask; EVEN: there is nothing outside."""
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def store(ptr, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def norm_group_of(
    gated_ptr, z_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, GATES: tl.constexpr
):
    """Norm SIZE channels of a token. They were written by other programs: read past the L1."""
    BLOCK: tl.constexpr = min(NORM_BLOCK, triton.next_power_of_2(SIZE))
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(gated_ptr + at, mask=at < SIZE, other=0.0, cache_modifier=".cg")
        total += value * value
    scale = tl.rsqrt(tl.sum(total) / SIZE + eps)
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        if SIZE > BLOCK:
            value = tl.load(gated_ptr + at, mask=at < SIZE, other=0.0, cache_modifier=".cg")
        normed = value * scale * tl.load(weight_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
        if GATES:
            normed *= silu(tl.load(z_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32))
        tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=at < SIZE)


def unsupported(parameters: MambaParameters) -> str | None:
    """Why the kernels do not compute a layer; None if they do."""
    norm, sizes = parameters.norm, parameters.sizes
    if sizes.state_size > MOST_STATE:
        return f"a state of {sizes.state_size} a channel is larger than {MOST_STATE}"
    if norm is not None and norm.group_size % sizes.head_dim:
        return f"a norm group of {norm.group_size} is not made of heads of {sizes.head_dim}"
    return None


def norm_kind(norm: GatedNorm | None) -> int:
    """The kind of norm, as the kernels take it."""
    if norm is None:
        return NO_NORM
    return NORM_BEFORE_GATE if norm.before_gate else NORM_AFTER_GATE


def check_layout(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
) -> None:
    """Raises ValueError for tensors that the kernels would read wrongly."""
    if projected.stride(1) != 1 or out.stride(1) != 1 or states.inputs.stride(2) != 1:
        raise ValueError("the last dimensions of projected, out and inputs must be contiguous")
    if not states.ssm[0].is_contiguous() or not parameters.conv_weight.is_contiguous():
        raise ValueError("each slot's ssm state and conv_weight must be contiguous")
    if not all(column.is_contiguous() for column in rows):
        raise ValueError("the columns of rows must be contiguous")
