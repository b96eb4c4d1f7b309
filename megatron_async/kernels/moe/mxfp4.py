"""MXFP4 weights (OCP Microscaling Formats 1.0): what they stand for, and how they are made.

32 neighbours of a row share a power of two; each is one of 16 numbers (e2m1), of 4 bits. A weight
``[..., n, k]`` is packed as uint8 ``[..., n, k / 2]``, the lower four bits of a byte first, and its
scales as uint8 ``[..., n, k / 32]``, exponents of two plus 127 (e8m0).
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


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[..., k]``, exact; NaN where a scale is.

    Args:
        packed: uint8 ``[..., k / 2]``.
        scale: uint8 ``[..., k / 32]``.
    """
    numbers = torch.tensor(_NUMBERS, device=packed.device)
    numbers = torch.cat((numbers, -numbers))
    blocks = packed.unflatten(-1, (-1, BLOCK // 2))
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    values = numbers[pairs.flatten(-2).int()]
    unpacked = torch.ldexp(values, scale.int()[..., None] - _BIAS)
    return unpacked.masked_fill_((scale == NOT_A_NUMBER)[..., None], torch.nan).flatten(-2)


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """The packed numbers and the scales of float ``values [..., k]``, all of them finite.

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
    return codes[..., ::2] | (codes[..., 1::2] << 4), (exponent + _BIAS).to(PACKED)
