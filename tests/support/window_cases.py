"""Decode steps of windows: each row brings several tokens, of which the first and the last may be
padding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.attention.decode_attention import DecodeAttention, Heads
from megatron_async.kernels.attention.e4m3_cache import E4M3, encode
from megatron_async.kernels.attention.paged_decode import paged_decode_attention_reference
from megatron_async.kernels.attention.rope_append import rope_append_reference

KV_HEADS, EPS = 2, 1e-6
SCALES = [[2.0**-6, 2.0**-9], [2.0**-8, 2.0**-4]]
"""Of keys and of values in e4m3, by head: some numbers of a standard normal distribution are too
large for one, and some subnormal for another."""


class Row(NamedTuple):
    """A row with ``length`` tokens in the cache: ``tokens`` of its window behind the first ``gap``
    are no padding. A dead row has all of its tokens, and appends them to the null block."""

    length: int
    tokens: int
    dead: bool = False
    gap: int = 0


class WindowCase:
    """Tensors of a step. What no row has is NaN, the null block too.

    Args:
        shape: head dimension, heads of a group, block size, norms of heads, rotation.
        limits: of a layer; ``"sinks": True`` is replaced by a sink of each head.
        e4m3: the cache is of that, with :data:`SCALES`.
    """

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        window: int,
        rows: list[Row],
        seed: int = 0,
        limits: dict[str, Any] | None = None,
        *,
        e4m3: bool = False,
    ) -> None:
        head_dim, group, block_size, norm, rope = shape
        gaps = any(row.gap for row in rows)
        self.heads = Heads(
            head_dim, group, KV_HEADS, block_size, norm, rope, window, gaps, e4m3=e4m3
        )
        self.limits = dict(limits or {})
        self.heads = self.heads.limited(self.limits)
        self.rows, self.window, self.device = rows, window, device
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).bfloat16()

        columns = (max(row.length for row in rows) + window - 1) // block_size + 1
        self.capacity = columns * block_size
        blocks = len(rows) * columns + 1
        order = torch.randperm(blocks - 1, generator=generator, device=device) + 1
        null_slot = len(rows) + 2
        self.table = torch.zeros(null_slot + 1, columns, dtype=torch.int64, device=device)
        own = torch.arange(len(rows), device=device).flip(0) + 1
        self.table[own] = order.view(len(rows), columns)
        shape_of_cache = (2, blocks, block_size, KV_HEADS, head_dim)
        self.cache = torch.full(shape_of_cache, math.nan, device=device).bfloat16()
        offsets = torch.arange(window, device=device)
        lengths = torch.tensor([row.length for row in rows], device=device)
        counts = torch.tensor([row.tokens for row in rows], device=device)
        offsets = offsets - torch.tensor([[row.gap] for row in rows], device=device)
        self.valid = ((offsets >= 0) & (offsets < counts[:, None])).flatten()
        self.dead = torch.tensor([row.dead for row in rows], device=device)
        self.dead = self.dead.repeat_interleave(window)
        self.slots = torch.where(self.valid, own.repeat_interleave(window), null_slot)
        positions = (lengths[:, None] + offsets).flatten()
        self.positions = torch.where(self.valid, positions, 0)
        appends = torch.where(
            self.dead, 0, self.table[self.slots, self.positions // block_size] * block_size
        )
        self.mapping = appends + self.positions % block_size
        for slot, row in zip(own.tolist(), rows, strict=True):
            at = torch.arange(row.length, device=device)
            past = draw(2, row.length, KV_HEADS, head_dim)
            self.cache[:, self.table[slot][at // block_size], at % block_size] = past
            if "window" in self.limits:
                self._forget(slot, row.length + 1 - self.limits["window"], block_size)
        self.scales: Tensor | None = None
        if e4m3:
            self.scales = torch.tensor(SCALES, device=device)
            self.cache = encoded(self.cache, self.scales)
        self.packed = draw(len(rows) * window, KV_HEADS * (group + 2) * head_dim)
        self.norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if norm:
            self.norms = draw(head_dim) + 1, draw(head_dim) + 1
        self.cos_sin = None
        if rope:  # of positions that a request may have, and no others
            table = (self.capacity, 2, head_dim // 2)
            self.cos_sin = torch.randn(table, generator=generator, device=device)
        if "sinks" in self.limits:  # next to a few scores as to a thousand
            self.limits["sinks"] = draw(KV_HEADS * group) * 3 + 2
        self.scale = 1 / math.sqrt(head_dim)

    def _forget(self, slot: int, tokens: int, block_size: int) -> None:
        """NaN in the first ``tokens`` of a row, whose whole blocks come free."""
        gone = torch.arange(max(0, tokens), device=self.device)
        self.cache[:, self.table[slot][gone // block_size], gone % block_size] = math.nan
        self.table[slot, : len(gone) // block_size] = 0

    def kernel(self, cluster: int, split_tokens: int) -> DecodeAttention:
        rows, device = len(self.rows), self.device
        return DecodeAttention(
            self.heads, rows, self.capacity, device, cluster=cluster, split_tokens=split_tokens
        )

    def attend(self, kernel: DecodeAttention) -> Tensor:
        """``[T, heads, head_dim]``; appends to the cache."""
        heads = KV_HEADS * self.heads.group
        out = torch.full((len(self.packed), heads, self.heads.head_dim), math.nan)
        out = out.to(self.device).bfloat16()
        keys, values = self.cache
        kernel(
            self.packed, keys, values, self.table, self.slots, self.positions, self.mapping, out,
            scale=self.scale, cos_sin=self.cos_sin, q_weight=self.norms[0],
            k_weight=self.norms[1], eps=EPS, scales=self.scales,
            sinks=self.limits.get("sinks"),
        )  # fmt: skip
        return out

    def wanted(self) -> tuple[Tensor, Tensor]:
        """What :meth:`attend` gives, and the cache behind it: keys and values of all tokens are
        appended, then each token attends as a row of its own, in float64. Queries and keys are
        rounded to bfloat16 before, which would else be most of the difference."""
        query, cache = self._appended()
        return self._over(query, cache), cache

    def wanted_over(self, cache: Tensor) -> Tensor:
        """The same over a cache that has the keys and values of all tokens."""
        return self._over(self._appended()[0], cache)

    def _appended(self) -> tuple[Tensor, Tensor]:
        """Queries, and the cache."""
        cache = self.cache.clone()
        keys, values = cache
        query = rope_append_reference(
            self.packed, keys, values, self.mapping, self.positions, self.cos_sin, *self.norms, EPS,
            self.scales,
        )  # fmt: skip
        return query, cache

    def _over(self, query: Tensor, cache: Tensor) -> Tensor:
        keys, values = cache.double()
        if self.scales is not None:
            scales = self.scales.double()[..., None]
            keys, values = keys * scales[0], values * scales[1]
        return paged_decode_attention_reference(
            query.double(), keys, values, self.table, self.positions + 1, self.scale, self.slots,
            **self.limits,
        )  # fmt: skip

    @property
    def counted(self) -> Tensor:
        """Tokens whose result means something, bool ``[T]``."""
        return self.valid & ~self.dead


def encoded(cache: Tensor, scales: Tensor) -> Tensor:
    """Keys and values ``[2, ..., heads, head_dim]`` as e4m3, with scales ``[2, heads]``."""
    parts = [encode(x, scale).view(torch.uint8) for x, scale in zip(cache, scales, strict=True)]
    return torch.stack(parts).view(E4M3)


def bits(cache: Tensor) -> Tensor:
    """A cache as integers of its width."""
    return cache.view(torch.uint8 if cache.dtype == E4M3 else torch.int16)
