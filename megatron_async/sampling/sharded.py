"""Token sampling over ranks that have a part of the vocabulary each, without gathering logits.

The same tokens as ``sampling.sample`` gives for the whole row, bit for bit: noise is a function of
the token id, so each rank finds its best score, and the largest of (score, lowest id) over all
ranks is the token: one exchange of eight bytes a row. Thresholds of top-k and top-p are found by
radix selection (as in Alabi et al., "Fast k-selection algorithms for graphics processors", 2012)
over integer counts and masses, whose sums do not depend on an order: four exchanges of 2 KiB a row
for each of the two.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_async.sampling import filters, noise
from megatron_async.sampling.sample import SampleInputs

DIGIT_BITS = 8
DIGITS = range(32 - DIGIT_BITS, -1, -DIGIT_BITS)
FAILED_KEY = torch.iinfo(torch.int64).max
"""Above all keys: the row has a NaN."""
LOW = 2**31 - 1


class Exchange(Protocol):
    """Collectives over the ranks that share the vocabulary, in place; equal bits on all of them."""

    def sum_(self, x: Tensor) -> Tensor: ...

    def max_(self, x: Tensor) -> Tensor: ...


def sample_tokens_sharded(
    logits: Tensor,
    inputs: SampleInputs,
    *,
    first_id: int,
    vocab_size: int,
    exchange: Exchange,
) -> Tensor:
    """``runner.sampler.sample_tokens`` of this rank's columns.

    Args:
        logits: ``[R, W]``, those of the ids from ``first_id`` on, the same number on each rank.
        vocab_size: of all ranks; ids from it on are padding.

    Returns:
        int64 ``[R]``, the same on all ranks; -1 for a row whose candidates hold NaN.
    """
    inverse_temperature, top_k, top_p, seed, position = inputs
    held = max(0, min(logits.shape[1], vocab_size - first_id))
    failed = logits[:, :held].isnan().any(1)
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    x = filters.without_nan(logits).masked_fill(ids >= vocab_size, -torch.inf)
    sampled = inverse_temperature > 0.0
    factor = torch.where(sampled, inverse_temperature, 1.0)
    scores = x
    if x.is_cuda or bool(sampled.any()):
        noisy = filters.scale_logits(x, factor) + _gumbel(seed, position, ids)
        dropped = x == -torch.inf
        filtered = filters.top_k_enabled(top_k, vocab_size) | filters.top_p_enabled(top_p)
        # All ranks read the same parameters, so all take the same way.
        if x.is_cuda or bool((sampled & filtered).any()):
            is_candidate = (ids < vocab_size).expand_as(x)
            threshold = _threshold(x, is_candidate, factor, top_k, top_p, vocab_size, exchange)
            dropped = dropped | (x < threshold[:, None])
        scores = torch.where(sampled[:, None], noisy.masked_fill(dropped, -torch.inf), x)
    best = scores.argmax(1, keepdim=True)
    key = (_ordered(scores.gather(1, best)[:, 0]) << 32) | (LOW - ids[best[:, 0]])
    key = exchange.max_(key.masked_fill(failed, FAILED_KEY))
    return (LOW - (key & 0xFFFFFFFF)).masked_fill(key == FAILED_KEY, -1)


def _gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Noise of ``ids`` [W] in each row: float32 ``[R, W]``."""
    rows, width = len(seed), len(ids)
    found = noise.gumbel_at(
        seed.repeat_interleave(width), position.repeat_interleave(width), ids.repeat(rows)
    )
    return found.view(rows, width)


def _ordered(x: Tensor) -> Tensor:
    """float32 to int64 in ``[-2**31, 2**31)`` of the same order."""
    bits = (x + 0.0).view(torch.int32)  # -0 is 0
    return (bits ^ ((bits >> 31) & LOW)).to(torch.int64)


def _value(ordered: Tensor) -> Tensor:
    """The inverse of :func:`_ordered`."""
    bits = ordered.to(torch.int32)
    return (bits ^ ((bits >> 31) & LOW)).view(torch.float32)


def _threshold(
    x: Tensor,
    is_candidate: Tensor,
    factor: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    exchange: Exchange,
) -> Tensor:
    """``filters.filter_threshold`` of the whole rows: float32 ``[R]``."""
    ordered = _ordered(x)
    row_max = exchange.max_(x.amax(1))
    k_enabled, p_enabled = filters.top_k_enabled(top_k, vocab_size), filters.top_p_enabled(top_p)
    threshold = torch.full_like(row_max, -torch.inf)
    if x.is_cuda or bool(k_enabled.any()):
        needed = top_k.to(torch.int64).clamp(1, vocab_size)
        kth = _select(ordered, is_candidate.to(torch.int64), needed, exchange)
        threshold = torch.where(k_enabled, kth, threshold)
    if x.is_cuda or bool(p_enabled.any()):
        mass = filters.probability_mass(x, factor, row_max).masked_fill(~is_candidate, 0)
        total = exchange.sum_(mass.masked_fill(x < threshold[:, None], 0).sum(1))
        nucleus = _select(ordered, mass, filters.nucleus_mass(total, top_p), exchange)
        threshold = torch.where(p_enabled, torch.maximum(nucleus, threshold), threshold)
    return threshold


def _select(ordered: Tensor, weights: Tensor, needed: Tensor, exchange: Exchange) -> Tensor:
    """The largest value at or above which there is a weight of ``needed`` on all ranks: float32
    ``[R]``, from int64 ``[R, W]``, ``[R, W]`` and ``[R]``."""
    unsigned = ordered + 2**31
    rows = len(ordered)
    prefix, above = torch.zeros_like(needed), torch.zeros_like(needed)
    for shift in DIGITS:
        digit = (unsigned >> shift) & (2**DIGIT_BITS - 1)
        counted = weights.masked_fill((unsigned >> (shift + DIGIT_BITS)) != prefix[:, None], 0)
        histogram = counted.new_zeros(rows, 2**DIGIT_BITS).scatter_add_(1, digit, counted)
        histogram = exchange.sum_(histogram)
        at_least = histogram.flip(1).cumsum(1).flip(1) + above[:, None]
        chosen = ((at_least >= needed[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        above = (at_least - histogram).gather(1, chosen)[:, 0]
        prefix = (prefix << DIGIT_BITS) | chosen[:, 0]
    return _value(prefix - 2**31)
