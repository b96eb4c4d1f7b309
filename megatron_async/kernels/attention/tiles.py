"""Tiles of the Triton kernels of paged attention: those that were measured, or what fits a device
that has less shared memory.

Tiles depend on sizes of heads, their groups, the dtype and the device, never on rows or lengths: so
a row's bits do not depend on the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_async.kernels.shared_memory import (
    HOPPER_BYTES,
    first_that_fits,
    has_async_products,
    loop_buffers,
)

LEAST = 16
"""Rows, columns and depth of a product, at least."""
TILE_BYTES = 16384
"""Keys of a tile; two tiles of keys and of values are in shared memory at a time."""
SPLIT_STAGES = 5
LATENT_TILE_BYTES, LATENT_STAGES = 32768, 3
SUMS_PER_THREAD = 128
"""Registers of a thread that may hold sums of invariant attention: those of a split and those of
all splits before it."""
LATENT_HEADS = 16
"""Heads of a program of multi-latent decode attention."""


class Heads(NamedTuple):
    """What the heads of a layer are like.

    Args:
        query_heads, kv_heads: how many.
        value_dim: elements of a value. In multi-latent attention these are the first of a key, and
            ``more`` come behind them.
        more: None elsewhere: keys and values are apart, and equally large.
        element_size: bytes of an element.
    """

    query_heads: int
    kv_heads: int
    value_dim: int
    more: int | None
    element_size: int

    @classmethod
    def of(cls, query: torch.Tensor, kv_heads: int, latent: int | None) -> Heads:
        """Return the heads of a query ``[T, Hq, D]``, see
        ``paged_decode.paged_decode_attention``."""
        heads, head_dim = query.shape[1:]
        more = None if latent is None else head_dim - latent
        return cls(heads, kv_heads, latent or head_dim, more, query.element_size())

    @property
    def group(self) -> int:
        """Query heads that share a head of keys, where a program may have them all."""
        return self.query_heads if self.more is not None else self.query_heads // self.kv_heads

    @property
    def value_pad(self) -> int:
        """Columns of a tile of values."""
        return padded(self.value_dim)

    @property
    def more_pad(self) -> int:
        """Columns of a tile of what keys have behind their values."""
        return padded(self.more or 0)

    def shared_bytes(self, tile: SplitTile | PrefillTile, limit: int) -> int:
        """What a program takes of shared memory at most on a device with such a limit: its queries,
        the buffers of keys and values, weights and places of keys; at the end the sums change
        hands, those of splits in fp32."""
        rows, keys, stages = tile.rows, tile.keys, tile.stages
        others = self.value_pad if self.more is None else self.more_pad
        size = self.element_size
        query = rows * (self.value_pad + (0 if self.more is None else others)) * size
        stage, weights = keys * (self.value_pad + others) * size, rows * keys * size
        buffers = loop_buffers(stages, indirect=True)
        taken = buffers * stage + weights
        if stages == 1 and size == 2 and self.more is not None:
            taken += keys * self.value_pad * size  # latents as values, apart from them as keys
        if rows >= 64 and size == 2 and has_async_products(limit):
            taken = max(taken, (buffers + 1) * stage)  # whose weights are in registers
        sums = rows * (self.value_pad + 4) * (size if isinstance(tile, PrefillTile) else 4)
        return max(query + taken + 16 * keys + 8 * rows + 1024, sums)


class SplitTile(NamedTuple):
    """The tile of decode attention."""

    group: int
    """Heads of a program, which share their keys."""
    keys: int
    """Keys of a tile, a power of two."""
    stages: int

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return padded(self.group)


class PrefillTile(NamedTuple):
    """The tile of prefill attention; chosen so that nothing spills on sm_90."""

    group: int
    rows: int
    """Queries of a tile, tokens times heads of a group."""
    keys: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """The power of two that a tile has for ``size``."""
    return max(LEAST, 1 << max(size - 1, 0).bit_length())


def heads_at_once(heads: int, most: int) -> int:
    """The largest divisor of ``heads`` up to ``most``."""
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)


def _keys(heads: Heads, tile_bytes: int) -> int:
    return max(LEAST, min(64, tile_bytes // (heads.value_pad * heads.element_size)))


@functools.cache
def split_tile(heads: Heads, limit: int = HOPPER_BYTES) -> SplitTile:
    """The tile of decode attention."""
    if heads.more is None:
        tile = SplitTile(heads.group, _keys(heads, TILE_BYTES), SPLIT_STAGES)
    else:
        group = heads_at_once(heads.query_heads, LATENT_HEADS)
        tile = SplitTile(group, _keys(heads, LATENT_TILE_BYTES), LATENT_STAGES)
    return first_that_fits(
        itertools.chain((tile,), smaller_splits(tile)),
        lambda each: heads.shared_bytes(each, limit),
        limit,
    )


def smaller_splits(tile: SplitTile) -> Iterator[SplitTile]:
    """Tiles that take less: fewer stages, fewer keys, fewer heads."""
    for group in _divisors(tile.group):
        for keys in _halves(tile.keys):
            for stages in range(tile.stages, 0, -1):
                yield SplitTile(group, keys, stages)


@functools.cache
def prefill_tile(heads: Heads, limit: int = HOPPER_BYTES) -> PrefillTile:
    """The tile of prefill attention. Exact fp32 multiplications go through no tensor core and hold
    their operands in registers. The sums of multi-latent attention are twice as wide as any
    other's; a program has as many heads as go into its rows."""
    is_wide, is_latent = heads.element_size == 4, heads.more is not None
    if is_latent and is_wide:
        rows, keys, warps, stages = 16, 16, 8, 1
    elif is_latent:
        rows, keys, warps, stages = 64, _keys(heads, LATENT_TILE_BYTES), 8, 2
    elif is_wide:
        rows, keys, warps, stages = 32, 16, 8, 2
    else:
        rows, keys, warps, stages = 64, _keys(heads, TILE_BYTES), 4, 3
    group = heads_at_once(heads.query_heads, rows) if is_latent else heads.group
    tile = PrefillTile(group, max(rows, padded(group)), keys, warps, stages)
    return first_that_fits(
        itertools.chain((tile,), smaller_prefills(tile)),
        lambda each: heads.shared_bytes(each, limit),
        limit,
    )


def smaller_prefills(tile: PrefillTile) -> Iterator[PrefillTile]:
    """Tiles that take less: fewer stages, fewer keys, fewer tokens, fewer heads."""
    for group in _divisors(tile.group):
        for rows in _halves(tile.rows, padded(group)):
            for keys in _halves(tile.keys):
                for stages in range(tile.stages, 0, -1):
                    yield PrefillTile(group, rows, keys, tile.warps, stages)


@functools.cache
def invariant_tile(heads: Heads, limit: int = HOPPER_BYTES, *, rows: bool = False) -> PrefillTile:
    """The tile of invariant attention, for chunks or for rows: they differ in ``stages`` alone,
    which change no bits. Nothing is latent."""
    tile = prefill_tile(heads, limit)
    while 2 * tile.rows * heads.value_pad > SUMS_PER_THREAD * 32 * tile.warps and tile.warps < 8:
        tile = tile._replace(warps=2 * tile.warps)
    if not rows:
        return tile
    sums = tile.rows * (heads.value_pad + 4) * 4  # which change hands
    return first_that_fits(
        fewer_stages(tile._replace(stages=SPLIT_STAGES)),
        lambda each: max(sums, heads.shared_bytes(each, limit)),
        limit,
    )


def fewer_stages(tile: PrefillTile) -> Iterator[PrefillTile]:
    """Tiles that take less shared memory, with the same bits."""
    return (tile._replace(stages=stages) for stages in range(tile.stages, 0, -1))


def fits(heads: Heads, limit: int) -> bool:
    """Whether any tile does."""
    return heads.shared_bytes(SplitTile(1, LEAST, 1), limit) <= limit


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(number, 0, -1) if number % n == 0)


def _halves(size: int, least: int = LEAST) -> Iterator[int]:
    while size >= least:
        yield size
        size //= 2
