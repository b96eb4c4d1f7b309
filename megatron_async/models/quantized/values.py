"""What e4m3 weights with scales stand for, and how they are made.

A weight ``[..., n, k]`` has scales fp32 ``[..., n, g]``: each row has one for each of its ``g``
groups of ``k / g`` columns. A value is its e4m3 number times its scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
PACKED = torch.uint8
"""The dtype of weights ``[..., n, k / 2]`` in MXFP4, see ``kernels/moe/mxfp4.py``."""
KEPT = (E4M3, PACKED)
"""Weights of these have scales."""
LARGEST = 448.0
"""The largest number of e4m3."""
FEWEST_COLUMNS = 32
"""That share a scale: scales of fewer would cost more than an eighth of the weights' bytes."""


def is_packed(weight: Tensor) -> bool:
    """Whether a parameter, or a view of one, is MXFP4: no other one is of bytes."""
    return weight.dtype == PACKED


def meant_shape(weight: Tensor) -> list[int]:
    """The shape of what a parameter, or a view of one, stands for."""
    if not is_packed(weight):
        return list(weight.shape)
    *lead, half = weight.shape
    return [*lead, 2 * half]


def columns_of(k: int, block: int) -> int | None:
    """The columns that share a scale, in a weight of ``k`` columns that has scales for blocks of
    ``block``, or begins at a multiple of ``k``; None if they would be too few."""
    columns = math.gcd(k, block)
    return columns if columns >= min(FEWEST_COLUMNS, k) else None


def multiply_out(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of e4m3 ``weight [..., n, k]`` with ``scale [..., n, g]``: exact products in fp32,
    rounded to ``dtype`` once."""
    groups: Tensor = weight.float().unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale[..., None]).flatten(-2).to(dtype)


def quantize(values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """E4m3 ``[..., n, k]`` and scales fp32 ``[..., n, groups]`` of float ``values [..., n, k]``:
    the largest of each group becomes 448, and others are rounded to the nearest, ties to even.
    A group with a NaN or an infinity has a NaN."""
    wide: Tensor = values.float().unflatten(-1, (groups, -1))
    largest = wide.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    return numbers.flatten(-2), scale.squeeze(-1)


def scales_at(view: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    """The view of ``scale [..., n, g]`` that has the scales of ``view``, whole rows of ``weight
    [..., n, k]`` in any arrangement; None if it has parts of rows."""
    k, g = weight.shape[-1], scale.shape[-1]
    offset = (view.data_ptr() - weight.data_ptr()) // weight.itemsize
    *rows, last = view.stride()
    if view.shape[-1] != k or last != 1 or offset % k or any(stride % k for stride in rows):
        return None
    strides = (*(stride // k * g for stride in rows), 1)
    return scale.as_strided(
        (*view.shape[:-1], g), strides, scale.storage_offset() + offset // k * g
    )
