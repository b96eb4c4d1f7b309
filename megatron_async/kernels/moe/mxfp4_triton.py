"""MXFP4 weights in Triton kernels: as factors of products, and multiplied out.

A word of 32 bits has eight neighbours of a row, in the order of ``mxfp4.py``. Shifted together they
become pairs of bfloat16, the exponent of which lacks its bias: they are ``2 ** 126`` times too
small. What they are multiplied by makes up for it, and has the scale of their 32 neighbours in it.
That would be too large where scales are above 2, so products are ``2 ** 32`` times too small until
they have been added up. All of it is exact for scales from ``2 ** -93`` to ``2 ** 33``. Larger ones
become infinite, as does one that is not a number. In the kernel of few rows (``moe_row.cu``) scales
are exact from ``2 ** -88`` to ``2 ** 45``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MISSING = tl.constexpr(float(2**32))
"""What sums of products with :func:`widen_mxfp4` are to be multiplied by."""
_OUT_BLOCK, _WARPS = 512, 4
"""Words of a program, and its warps."""


@triton.jit
def mxfp4_factors(scale_ptr, row, in_weight, word, WIDTH: tl.constexpr):
    """bfloat16 ``[rows, words]``: what the numbers of each word are multiplied by.

    Args:
        row, in_weight: int64 and bool ``[rows]``, rows of the weight, and whether they are there.
        word: int32 ``[words]``, words of a row, which has ``WIDTH``.
    """
    mask = in_weight[:, None] & (word < WIDTH)[None, :]
    ptrs = scale_ptr + row[:, None] * (WIDTH // 4) + (word // 4)[None, :]  # four share one
    scale = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
    bits = tl.minimum(scale + (126 - 32), 255) << 7
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _bits(words, PLACE: tl.constexpr):
    """int32: the bits of numbers ``PLACE`` and ``PLACE + 4`` of each word, where bfloat16 has them,
    the first one's below."""
    moved = words.to(tl.uint32, bitcast=True)
    if PLACE == 1:
        moved = moved << 6
    elif PLACE == 2:
        moved = (moved << 12) | (moved >> 20)
    elif PLACE == 3:
        moved = (moved << 2) ^ (moved >> 6)
    return moved.to(tl.int32, bitcast=True) & -0x7E3F_7E40


@triton.jit
def _pair(words, factor, PLACE: tl.constexpr):
    """The bits of numbers ``PLACE`` and ``PLACE + 4`` of each word, times its factor."""
    both = _bits(words, PLACE)
    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    low, high = low * factor, high * factor
    return tl.join(low.to(tl.int16, bitcast=True), high.to(tl.int16, bitcast=True))


@triton.jit
def widen_mxfp4(words, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """bfloat16 ``[ROWS, COLUMNS]``: the numbers of int32 ``words [ROWS, COLUMNS / 8]``, each times
    the ``factor`` of its word."""
    # The places of a word's numbers are 4 a + 2 b + c; a pair has both a.
    even = tl.join(_pair(words, factor, 0), _pair(words, factor, 2))
    odd = tl.join(_pair(words, factor, 1), _pair(words, factor, 3))
    bits = tl.reshape(tl.join(even, odd), [ROWS, COLUMNS])
    # Bits until here: Triton 3.6 moves the reshape of what a product reads behind its copy to
    # shared memory, and has no layout for that one there.
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _value(bits, power):
    """fp32: the number whose bits the lowest 16 have, times its scale."""
    size = (bits >> 6) & 7
    value = tl.where(size < 2, size * 0.5, (1 + (size & 1) * 0.5) * (1 << (size >> 1)) * 0.5)
    return tl.where(bits & 0x8000 > 0, -value, value) * power


@triton.jit
def _values(words, power, PLACE: tl.constexpr):
    """As :func:`_pair`, fp32 and times the whole scale."""
    bits = _bits(words, PLACE)
    return tl.join(_value(bits, power), _value(bits >> 16, power))


@triton.jit
def _multiply_out_kernel(words_ptr, scale_ptr, out_ptr, count, BLOCK: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < count
    words = tl.load(words_ptr + word, mask=mask, other=0)
    scale = tl.load(scale_ptr + word // 4, mask=mask, other=0).to(tl.int32)
    # 2 ** -127 is subnormal; 255 is not a number.
    bits = tl.where(scale == 0, 0x400000, tl.where(scale == 255, 0x7FC00000, scale << 23))
    power = bits.to(tl.float32, bitcast=True)
    even = tl.join(_values(words, power, 0), _values(words, power, 2))
    odd = tl.join(_values(words, power, 1), _values(words, power, 3))
    values = tl.reshape(tl.join(even, odd), [BLOCK * 8]).to(out_ptr.dtype.element_ty)
    place = tl.arange(0, BLOCK * 8)
    first = tl.program_id(0).to(tl.int64) * BLOCK * 8
    tl.store(out_ptr + first + place, values, mask=first + place < count * 8)


def multiply_out(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`~.mxfp4.unpack` in ``dtype``, rounded to it once, of contiguous numbers."""
    *lead, half = packed.shape
    out = torch.empty(*lead, 2 * half, dtype=dtype, device=packed.device)
    words = packed.view(torch.int32)
    if out.numel():
        _multiply_out_kernel[(triton.cdiv(words.numel(), _OUT_BLOCK),)](
            words, scale, out, words.numel(), BLOCK=_OUT_BLOCK, num_warps=_WARPS
        )
    return out
