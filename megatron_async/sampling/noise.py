"""Gumbel noise of token ids, a pure function of (seed, position, id).

Gumbel 1954; its use to sample from a softmax is in Maddison et al., "A* Sampling" (NeurIPS 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.sampling import exact_math, philox

UNIFORM_MAX = 1.0 - 2.0**-24
"""Uniforms that would round to one are clamped to this."""


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Noise of every id of every row: int64 ``[R]``, ``[R]`` to float32 ``[R, vocab_size]``."""
    return gumbel_from_bits(philox.noise_bits(seed, position, vocab_size))


def gumbel_at(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Noise of single ``(seed, position, token_id)`` triples: int64 ``[N]`` to float32 ``[N]``."""
    return gumbel_from_bits(philox.noise_bits_at(seed, position, token_id))


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel variates ``-log(-log1p(-v))``, ``v = (bits + 1/2) / 2**32``.

    Small ``v``, which gives the large variates that decide an argmax, has full precision.

    Args:
        bits: int64 in ``[0, 2**32)``, any shape.

    Returns:
        float32, between -2.82 and 22.9.
    """
    v = (bits * 2 + 1).to(torch.float32).mul_(2.0**-33).clamp_(max=UNIFORM_MAX)
    exponential = exact_math.log1p(v.neg_()).neg_()
    return exact_math.log(exponential).neg_()
