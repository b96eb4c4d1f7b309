"""Slices on their way from one rank to another: packed into buckets of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.weights.sharded.checksum import DIGITS, checksum
from megatron_async.weights.sharded.plan import Slice

ALIGNMENT = 16
"""Bytes to which slices are aligned in a bucket."""

Dtypes = Mapping[str, torch.dtype]
"""The dtypes of a trainer rank's tensors, by name."""


class Packed(NamedTuple):
    """A slice, and where its bytes are in a bucket."""

    slice: Slice
    dtype: torch.dtype
    offset: int

    def view(self, room: Tensor) -> Tensor:
        """Its elements in a bucket's memory."""
        count = math.prod(self.slice.sizes) * self.dtype.itemsize
        found = room[self.offset : self.offset + count]
        return found.view(self.dtype).view(self.slice.sizes)


class Bucket(NamedTuple):
    """Slices that go together. ``sums``: where their checksums begin, behind them."""

    packed: list[Packed]
    sums: int
    nbytes: int

    def pack(self, tensors: Mapping[str, Tensor], room: Tensor) -> Tensor:
        """Copy the slices of a trainer rank's tensors into ``room``; what there is to be sent."""
        room = room[: self.nbytes]
        for each in self.packed:
            each.view(room).copy_(each.slice.of(tensors[each.slice.name]))
        if self.nbytes > self.sums:
            sums = "".join(checksum(each.view(room)) for each in self.packed)
            room[self.sums :].copy_(torch.frombuffer(bytearray(sums.encode()), dtype=torch.uint8))
        return room

    def wrong(self, room: Tensor) -> str | None:
        """The first tensor of which a slice in ``room`` has another checksum than what has come
        with it; None for none."""
        if self.nbytes == self.sums:
            return None
        sums = bytes(room[self.sums : self.nbytes].tolist()).decode(errors="replace")
        for number, each in enumerate(self.packed):
            if checksum(each.view(room)) != sums[number * DIGITS : (number + 1) * DIGITS]:
                return each.slice.name
        return None


def buckets_of(
    slices: Iterable[Slice], dtypes: Dtypes, limit: int, *, checksums: bool
) -> list[Bucket]:
    """The buckets that slices fill in their order, none with more than ``limit`` bytes of them."""
    found: list[Bucket] = []
    packed: list[Packed] = []
    end = 0
    for each in slices:
        dtype = dtypes[each.name]
        size = math.prod(each.sizes) * dtype.itemsize
        if packed and end + size > limit:
            found.append(_closed(packed, end, checksums))
            packed, end = [], 0
        packed.append(Packed(each, dtype, end))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    if packed:
        found.append(_closed(packed, end, checksums))
    return found


def parts_of(slices: Sequence[Slice], dtypes: Dtypes, limit: int) -> Iterator[Slice]:
    """Slices of at most ``limit`` bytes, or of one element, that make up ``slices``."""
    for each in slices:
        yield from _parts(each, limit // dtypes[each.name].itemsize)


def _parts(whole: Slice, most: int) -> Iterator[Slice]:
    longest = max(range(len(whole.sizes)), key=lambda n: (whole.sizes[n] > 1, -n), default=None)
    if math.prod(whole.sizes) <= most or longest is None or whole.sizes[longest] == 1:
        yield whole
        return
    half = whole.sizes[longest] // 2
    for first, size in ((0, half), (half, whole.sizes[longest] - half)):
        yield from _parts(_narrowed(whole, longest, first, size), most)


def _narrowed(whole: Slice, dimension: int, first: int, size: int) -> Slice:
    def changed(place: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*place[:dimension], value, *place[dimension + 1 :])

    return whole._replace(
        start=changed(whole.start, whole.start[dimension] + first),
        target_start=changed(whole.target_start, whole.target_start[dimension] + first),
        sizes=changed(whole.sizes, size),
    )


def _closed(packed: list[Packed], end: int, checksums: bool) -> Bucket:
    return Bucket(packed, end, end + DIGITS * len(packed) * checksums)
