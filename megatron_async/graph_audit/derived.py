"""Tensors that are made from others, and must follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Derived(NamedTuple):
    """A tensor and what it must equal, bit for bit.

    An object that keeps such tensors has a method ``derived_tensors()``, which yields them one by
    one, so that a check holds one value at a time.

    Args:
        name: of the tensor in its object.
        value: computes it anew, on any device.
    """

    name: str
    tensor: Tensor
    value: Callable[[], Tensor]
