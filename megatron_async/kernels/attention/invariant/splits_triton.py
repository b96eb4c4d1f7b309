"""Splits of a sequence's keys, and how their sums come together in one order.

Which splits a token has depends on its own position alone.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.attention.paged_prefill_triton import LOWEST


@triton.jit
def split_size(
    length, window, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr
):
    """Tokens of each split of a sequence of ``length`` tokens."""
    reach = length
    if WINDOW:
        reach = tl.minimum(length, window + (MIN_SPLIT - 1))
    return (reach + (MIN_SPLIT * MAX_SPLITS - 1)) // (MIN_SPLIT * MAX_SPLITS) * MIN_SPLIT


@triton.jit
def first_token(length, size, window, WINDOW: tl.constexpr):
    """Where the first split begins that a sequence's last token sees anything of."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // size * size
    return first


@triton.jit
def begin_splits(sink, SINKS: tl.constexpr):
    """Maximum and mass before the first split; a sink is a score of a token without a value."""
    highest = sink * 0.0 + LOWEST
    mass = sink * 0.0
    if SINKS:
        highest = tl.maximum(sink, LOWEST)
        mass = tl.exp2(sink - highest)
    return highest, mass


@triton.jit
def scales(highest, split_highest):
    """The new maximum, and what sums until now and those of a split are multiplied by."""
    raised = tl.maximum(highest, split_highest)
    return raised, tl.exp2(highest - raised), tl.exp2(split_highest - raised)


@triton.jit
def add_split(
    highest, mass, total, split_highest, split_mass, split_total, ROWS: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """A split of a tile's rows onto those before it."""
    highest, before, here = scales(highest, split_highest)
    mass = tl.fma(split_mass, here, mass * before)
    here_wide = tl.broadcast_to(here[:, None], [ROWS, D_PAD])
    return highest, mass, tl.fma(split_total, here_wide, total * before[:, None])
