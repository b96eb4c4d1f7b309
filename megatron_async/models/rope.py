"""Rotary position embeddings from a table, half-split convention (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_async.models.config import ModelConfig, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Angle per position of each rotated pair: fp32 ``[head_dim / 2]`` on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ratio = scaling.original_max_position_embeddings / wavelengths
    # 0 for wavelengths to stretch in full, 1 for those to keep.
    keep = ((ratio - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


FIRST_ROWS = 2**18
"""Most rows that a new table has."""


class RotaryTable(torch.nn.Module):
    """Cosines and sines of positions, one row each; never saved, always fp32. It grows with what
    is reserved: a model may say that it takes more positions than anybody uses.

    Args:
        frequencies: fp32 ``[pairs]``, see :func:`inverse_frequencies`.
        max_sequence_length: most rows.
        interpolation: positions are divided by it (linear interpolation).
    """

    cos_sin: Tensor

    def __init__(
        self, frequencies: Tensor, max_sequence_length: int, interpolation: float = 1.0
    ) -> None:
        super().__init__()
        # On the CPU for every device, so that all devices rotate by the same bits.
        self._frequencies = frequencies.detach().to("cpu", torch.float32)
        self._interpolation = interpolation
        self._most = max_sequence_length
        self._outgrown: list[Tensor] = []
        table = self._rows(min(max_sequence_length, FIRST_ROWS))
        self.register_buffer("cos_sin", table, persistent=False)

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32) / self._interpolation
        angles = torch.outer(positions, self._frequencies)
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def reserve(self, length: int) -> bool:
        """Have rows for ``length`` positions, or all that there may be; whether it has grown."""
        length = min(length, self._most)
        if length <= len(self.cos_sin):
            return False
        # Captured graphs read the table that they were captured with.
        self._outgrown.append(self.cos_sin)
        self.cos_sin = self._rows(length).to(self.cos_sin.device)
        return True

    @classmethod
    def from_config(cls, config: ModelConfig) -> RotaryTable:
        """The table of a model with ``position_embedding="rope"``."""
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        return cls(frequencies, config.max_sequence_length)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # Follows the model to another device, but not to another dtype.
        self.cos_sin = self.cos_sin.to(fn(self.cos_sin.new_empty(0)).device)
        return self

    def lookup(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 ``[T, pairs]`` each, of the positions ``[T]`` (int64)."""
        cos_sin = self.cos_sin[position_ids]
        return cos_sin[:, 0], cos_sin[:, 1]

    def prefix(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 ``[length, pairs]`` each, of the positions 0, 1, 2, ..."""
        self.reserve(length)
        cos_sin = self.cos_sin[:length]
        return cos_sin[:, 0], cos_sin[:, 1]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * pairs`` elements of each head, computed in fp32.

    Args:
        x: ``[T, heads, head_dim]``, or ``[T, batch, heads, head_dim]``.
        cos, sin: fp32 ``[T, pairs]``; pair ``i`` is the elements ``i`` and ``i + pairs``.

    Returns:
        A new tensor like ``x``. Sums and products only, so each row depends on itself alone.
    """
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    rotated = 2 * shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotated < x.shape[-1]:
        parts.append(x[..., rotated:].float())
    return torch.cat(parts, dim=-1).to(x.dtype)
