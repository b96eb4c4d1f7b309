"""Drafts accepted at a rate, whatever the model samples: what a drafting step costs, and no more.

The tokens mean nothing then. Only ``bench`` asks for it.
"""

from __future__ import annotations

from torch import Tensor

from megatron_async.sampling.philox import MASK

MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""The first spreads positions, the others are MurmurHash3's finalizer (Appleby 2008)."""


def threshold(rate: float) -> int:
    """What :func:`synthetic_bits` must be below so that a draft is accepted at ``rate``."""
    return round(rate * (MASK + 1))


def synthetic_bits(positions: Tensor, seeds: Tensor) -> Tensor:
    """32 bits that depend on nothing but the place of a draft and its request's seed.

    Args:
        positions: int64 ``[R, k]``.
        seeds: int64 ``[R]``, any value; the low 32 bits count.

    Returns:
        int64 ``[R, k]`` in ``[0, 2**32)``.
    """
    spread, first, second = MIX
    bits = (positions * spread).bitwise_xor(seeds[:, None]) & MASK
    bits = ((bits ^ (bits >> 16)) * first) & MASK
    bits = ((bits ^ (bits >> 13)) * second) & MASK
    return bits ^ (bits >> 16)
