"""MXFP4 weights (OCP Microscaling Formats 1.0): what they stand for, and how they are made.

32 neighbours of a row share a power of two; each is one of 16 numbers (e2m1), of 4 bits. A weight
``[..., n, k]`` is packed as uint8 ``[..., n, k / 2]``, and its scales as uint8
``[..., n, k / 32]``, exponents of two plus 127 (e8m0).

Checkpoints have the lower four bits of a byte first. Here the 32 bits of eight neighbours are in
another order (:func:`arrange`), in which kernels find sign, exponent and mantissa of two numbers
where bfloat16 has them after a shift or two. Rows that are cut between blocks of 32 are what cut
rows become.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
PACKED = torch.uint8
NOT_A_NUMBER = 255
"""A scale that stands for none."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between one of the numbers and the next."""
_LARGEST_EXPONENT = 2
"""The largest number is 6."""
_BIAS = 127


def arrange(stored: Tensor) -> Tensor:
    """The packed numbers of a checkpoint, uint8 ``[..., k / 2]``, as kernels read them.

    Of eight numbers 0 to 7 of a word, in a half of 16 bits each, those of a pair n, n + 4 have
    sign, exponent and mantissa in bits 15, 8, 7 and 6 of the halves of a word: of the word itself
    for n = 0, shifted to the left by 6 for n = 1, rotated to the left by 12 for n = 2, and for
    n = 3 of two shifted ones, by 2 to the left and by 6 to the right, added without carry. What
    comes with these two of other pairs is added here too. Three shifts alone do not bring all 32
    bits of a word to these places.
    """
    words = _words(stored)
    sign, high, low, half = 3, 2, 1, 0

    def bit(pair: int, which: int) -> Tensor:
        """A bit of both numbers, in bits 0 and 16. It is made where it is needed: all of them
        take 16 times the memory of the words."""
        return (words >> (4 * pair + which)) & 0x10001

    arranged = bit(0, sign) << 15
    for pair, which, place in (
        (0, high, 8), (0, low, 7), (0, half, 6),
        (1, sign, 9), (1, high, 2), (1, low, 1), (1, half, 0),
        (2, sign, 3),
    ):  # fmt: skip
        arranged |= bit(pair, which) << place
    for which, place in ((high, 12), (low, 11), (half, 10)):
        arranged |= _other_half(bit(2, which)) << place
    thirteenth = bit(3, sign) ^ ((bit(3, low) ^ bit(3, sign)) >> 16)
    arranged |= thirteenth << 13
    arranged |= (bit(3, low) ^ thirteenth) << 5
    arranged |= (bit(3, high) ^ bit(0, half)) << 14
    arranged |= (bit(3, half) ^ _other_half(bit(2, high))) << 4
    return arranged.view(PACKED)


def _words(packed: Tensor) -> Tensor:
    """int32 ``[..., k / 8]``, eight numbers each: of memory of its own where ``packed`` is not
    contiguous, or begins where no word may."""
    whole = packed.contiguous()
    # A dimension of one row may have any stride.
    begins = whole.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in whole.stride()[:-1])
    return (whole if begins else torch.clone(whole.reshape(-1)).view(whole.shape)).view(torch.int32)


def _other_half(bits: Tensor) -> Tensor:
    """Bits 0 and 16 of words, each in the other's place."""
    return (bits >> 16) | ((bits & 1) << 16)


def _codes(packed: Tensor) -> Tensor:
    """What each of the numbers is, in their order: int32 ``[..., k]``, from 0 to 15."""
    words = _words(packed)
    # Bits that come in from the left by a shift to the right are no number's.
    right = [(words >> count) & ((1 << 32 - count) - 1) for count in (20, 6)]
    moved = (words, words << 6, (words << 12) | right[0], (words << 2) ^ right[1])
    pairs = [((bits >> 6) & 0x70007) | ((bits >> 12) & 0x80008) for bits in moved]
    codes = torch.stack([(pair >> 16 * n) & 15 for n in range(2) for pair in pairs], dim=-1)
    return codes.flatten(-2)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[..., k]``, exact; NaN where a scale is.

    Args:
        packed: uint8 ``[..., k / 2]``, as :func:`arrange` gives it.
        scale: uint8 ``[..., k / 32]``.
    """
    return _values(_codes(packed), scale)


def unpack_stored(stored: Tensor, scale: Tensor) -> Tensor:
    """:func:`unpack` of numbers in the order of a checkpoint."""
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    return _values(codes.int(), scale)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    numbers = torch.tensor(_NUMBERS, device=codes.device)
    numbers = torch.cat((numbers, -numbers))
    values = numbers[codes].unflatten(-1, (-1, BLOCK))
    unpacked = torch.ldexp(values, scale.int()[..., None] - _BIAS)
    return unpacked.masked_fill_((scale == NOT_A_NUMBER)[..., None], torch.nan).flatten(-2)


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """The packed numbers, as :func:`arrange` gives them, and the scales of float
    ``values [..., k]``, all of them finite.

    The scale of 32 neighbours is ``2 ** (floor(log2(largest)) - 2)``, from ``2 ** -127`` on. Values
    over it go to the nearest number, ties to the even one, and from 5 on to 6.
    """
    wide: Tensor = values.float().unflatten(-1, (-1, BLOCK))
    exponent = torch.frexp(wide.abs().amax(-1))[1] - 1 - _LARGEST_EXPONENT
    exponent = exponent.masked_fill_((wide == 0).all(-1), -_BIAS).clamp_(-_BIAS, _BIAS)
    over = torch.ldexp(wide, -exponent[..., None])
    size, codes = over.abs(), torch.zeros_like(over, dtype=PACKED)
    for code, bound in enumerate(_HALFWAY):
        # From an even number up to the next, odd one, what is halfway stays.
        codes += size > bound if code % 2 == 0 else size >= bound
    codes = (codes | (torch.signbit(over).to(PACKED) << 3)).flatten(-2)
    stored = codes[..., ::2] | (codes[..., 1::2] << 4)
    return arrange(stored), (exponent + _BIAS).to(PACKED)
