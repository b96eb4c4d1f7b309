"""A checksum of a tensor's bytes, of the same value wherever they lie."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WORDS = 1 << 18
"""Words of eight bytes that are added up at a time."""
DIGITS = 32
"""A checksum has as many, in base 16."""
_MASK = (1 << 64) - 1


def checksum(tensor: Tensor) -> str:
    """32 hexadecimal digits, of the sum of the tensor's words and of the sum of each word times its
    place, both modulo 2**64 (Fletcher's checksum). The second one tells words that have changed
    places."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    plain = torch.zeros((), dtype=torch.int64, device=data.device)
    placed = torch.zeros_like(plain)
    places = _places(data.device)
    for number, part in enumerate(data.split(8 * WORDS)):
        words = _words(part)
        total = words.sum()
        plain += total
        placed += total * (number * WORDS) + (words * places[: len(words)]).sum()
    return f"{int(plain) & _MASK:016x}{int(placed) & _MASK:016x}"


@functools.lru_cache(maxsize=16)
def _places(device: torch.device) -> Tensor:
    return torch.arange(1, WORDS + 1, dtype=torch.int64, device=device)


def _words(data: Tensor) -> Tensor:
    """int64: bytes, with zeros behind them."""
    rest = -len(data) % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    elif data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)
