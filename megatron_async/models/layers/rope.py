"""Rotary position embeddings from a table, half-split convention (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.models.description.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from megatron_async.graph_audit.derived import Derived


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None, *, long: bool = False
) -> Tensor:
    """Angle per position of each rotated pair: fp32 ``[rotary_dim / 2]`` on the CPU, rounded up
    where it is odd.

    Args:
        long: with "longrope", those of requests beyond ``original_max_position_embeddings``.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_ramp(rotary_dim, theta, scaling)
    elif scaling.kind == "longrope":
        factors = scaling.long_factor if long else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    else:
        keep = _llama3_ramp(frequencies, scaling)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


FIRST_ROWS = 2**12
"""Most rows that a new table has: an engine that serves more positions reserves them."""


def _llama3_ramp(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """0 for wavelengths to stretch in full, 1 for those to keep."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    tokens = scaling.original_max_position_embeddings
    assert low is not None and high is not None and tokens is not None
    ratio = tokens / (2 * math.pi / frequencies)
    return ((ratio - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_ramp(rotary_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """0 for pairs to interpolate in full, 1 for those to keep."""
    tokens = scaling.original_max_position_embeddings
    assert tokens is not None

    def pair(rotations: float) -> float:
        """Return the pair that makes ``rotations`` rotations within ``tokens``."""
        return rotary_dim * math.log(tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / (max(high - low, 0) or 0.001)).clamp(0.0, 1.0)


def _dynamic_angles(rotary_dim: int, theta: float, scaling: RopeScaling, length: int) -> Tensor:
    """Angles ``[length, pairs]`` of NTK-aware scaling: theta grows with the position."""
    tokens = scaling.original_max_position_embeddings
    assert tokens is not None
    positions = torch.arange(length, dtype=torch.float32)
    seen = (positions + 1).clamp(min=tokens)
    growth = scaling.factor * seen / tokens - (scaling.factor - 1)
    thetas = theta * growth ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return positions[:, None] * (1.0 / thetas[:, None] ** exponents)


class RotaryTable(torch.nn.Module):
    """Cosines and sines of positions, one row each; never saved, always fp32. It grows with what
    is reserved: a model may say that it takes more positions than anybody uses.

    Args:
        frequencies: fp32 ``[pairs]``, see :func:`inverse_frequencies`; or a function of a number of
            rows that returns angles ``[rows, pairs]``.
        max_sequence_length: most rows.
        interpolation: positions are divided by it (linear interpolation).
        factor: cosines and sines are multiplied by it.

    Attributes:
        long: the table of requests of more than ``limit`` tokens; None if there is this one alone.
    """

    cos_sin: Tensor
    long: RotaryTable | None
    limit: int | None

    def __init__(
        self,
        frequencies: Tensor | Callable[[int], Tensor],
        max_sequence_length: int,
        interpolation: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.long = self.limit = None
        # On the CPU for every device, so that all devices rotate by the same bits.
        if isinstance(frequencies, Tensor):
            frequencies = frequencies.detach().to("cpu", torch.float32)
        self._frequencies = frequencies
        self._interpolation, self._factor = interpolation, factor
        self._most = max_sequence_length
        self.outgrown: list[Tensor] = []
        """Tables that captured graphs go on with."""
        table = self._rows(min(max_sequence_length, FIRST_ROWS))
        self.register_buffer("cos_sin", table, persistent=False)

    def _rows(self, count: int) -> Tensor:
        if isinstance(self._frequencies, Tensor):
            positions = torch.arange(count, dtype=torch.float32) / self._interpolation
            angles = torch.outer(positions, self._frequencies)
        else:
            angles = self._frequencies(count)
        return torch.stack((angles.cos(), angles.sin()), dim=1) * self._factor

    def reserve(self, length: int) -> bool:
        """Have rows for ``length`` positions, or all that there may be; whether it has grown."""
        if self.long is not None:
            self.long.reserve(length)
        length = min(length, self._most)
        if length <= len(self.cos_sin):
            return False
        self.outgrown.append(self.cos_sin)
        self.cos_sin = self._rows(length).to(self.cos_sin.device)
        return True

    def derived_tensors(self) -> Iterator[Derived]:
        """The tables, which follow from the configuration."""
        from megatron_async.graph_audit.derived import Derived

        tables = {"cos_sin": self.cos_sin}
        tables |= {f"outgrown[{n}]": table for n, table in enumerate(self.outgrown)}
        for name, table in tables.items():
            yield Derived(name, table, functools.partial(self._rows, len(table)))

    @classmethod
    def from_config(cls, config: ModelConfig, *, sliding: bool = False) -> RotaryTable:
        """The table of a model with ``position_embedding="rope"``.

        Args:
            sliding: that of layers with a window, where they have one of their own.
        """
        theta, scaling = config.rope_theta, config.rope_scaling
        if sliding and config.sliding_rope_theta is not None:
            theta, scaling = config.sliding_rope_theta, config.sliding_rope_scaling
        dim, length = config.rotary_span, config.max_sequence_length
        factor = 1.0 if scaling is None else scaling.attention_factor
        if scaling is not None and scaling.kind == "dynamic":
            return cls(functools.partial(_dynamic_angles, dim, theta, scaling), length)
        table = cls(inverse_frequencies(dim, theta, scaling), length, factor=factor)
        original = None if scaling is None else scaling.original_max_position_embeddings
        if scaling is not None and scaling.kind == "longrope" and original and original < length:
            frequencies = inverse_frequencies(dim, theta, scaling, long=True)
            table.long, table.limit = cls(frequencies, length, factor=factor), original
        return table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # Follows the model to another device, but not to another dtype.
        self.cos_sin = self.cos_sin.to(fn(self.cos_sin.new_empty(0)).device)
        if self.long is not None:
            self.long.to(self.cos_sin.device)
        return self

    def lookup(self, position_ids: Tensor, is_long: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 ``[T, pairs]`` each, of the positions ``[T]`` (int64).

        Args:
            is_long: ``[T]``, nonzero for tokens of requests that are rotated by ``long``.
        """
        cos_sin = self.cos_sin[position_ids]
        if self.long is not None and is_long is not None:
            long = self.long.cos_sin[position_ids]
            cos_sin = torch.where(is_long[:, None, None] != 0, long, cos_sin)
        return cos_sin[:, 0], cos_sin[:, 1]

    def prefix(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 ``[length, pairs]`` each, of the positions 0, 1, 2, ..."""
        if self.long is not None and self.limit is not None and length > self.limit:
            return self.long.prefix(length)
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


def apply_rope_to_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`apply_rope` of heads ``[..., 2 * pairs]`` whose pairs are neighbours, as DeepSeek has
    them. They come out half a head apart: products of queries and keys are the same."""
    return apply_rope(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos, sin)
