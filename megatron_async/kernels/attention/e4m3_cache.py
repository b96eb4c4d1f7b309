"""Keys and values as e4m3: what is kept of them, and what is read.

A cache of e4m3 has a scale for each layer, head, and of keys and of values, a power of two. What is
kept is the number divided by it, rounded to the nearest, at most 448 in size. So what is read is
exact in bfloat16, float16 and float32, and scales of keys go into queries, and those of values into
the output, without rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
NAN = 0x7F
MOST_BITS = 60
"""The most that the exponent of a scale may be, in either direction."""
ROOM = 2.0
"""How much larger than the largest that scales are chosen by a later number may be."""


def scales_of(largest: Tensor) -> Tensor:
    """Fp32 powers of two for the largest magnitudes of heads, of any shape; 1 where there were
    none."""
    wide = largest.float() * (ROOM / LARGEST)
    known = wide.isfinite() & (wide > 0)
    return nearest_above(torch.where(known, wide, 1.0))


def nearest_above(scale: Tensor) -> Tensor:
    """Fp32 powers of two that are no smaller than positive ``scale``."""
    return scale.float().log2().ceil().clamp(-MOST_BITS, MOST_BITS).exp2()


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """E4m3 of ``x [..., heads, D]``, a float, with ``scale [heads]``. NaN stays NaN."""
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)


def write(cache: Tensor, slot_mapping: Tensor, x: Tensor) -> None:
    """``x [T, heads, D]`` to places ``slot_mapping`` int64 [T] of ``cache [blocks, bs, heads,
    D]``, both of one dtype."""
    if cache.dtype == E4M3:  # no operation of PyTorch's indexes it
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    cache.flatten(0, 1).index_copy_(0, slot_mapping, x)


def read(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """``cache[blocks]`` in ``dtype``, a copy; of e4m3 the numbers without their scale."""
    if cache.dtype != E4M3:
        return cache[blocks]
    return cache.view(torch.uint8)[blocks].view(E4M3).to(dtype)


def by_head(scale: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[heads, 1]``: the scale of each query head's key, of ``scale [kv_heads]``."""
    return scale.repeat_interleave(heads // len(scale)).to(dtype)[:, None]
