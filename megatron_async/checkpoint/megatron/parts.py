"""Where blocks of tensors of ``dist_checkpointing`` go: into parameters as they are, or into e4m3.

A matrix that is kept as e4m3 may come in several blocks, since ranks that saved it may have had
shares of its rows. So it is put together in the dtype that it is stored in, and quantized when it
is whole. Blocks are read in the order of the matrices, so that few are put together at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_async.checkpoint.quantized.kept import quantize_into
from megatron_async.checkpoint.reading.distributed_metadata import StoredChunk
from megatron_async.models.quantized.linear import quantized
from megatron_async.models.quantized.values import E4M3

Span = tuple[int, int]
"""First element, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a stored tensor that this rank has.

    Args:
        data: a view of a parameter, which the block fills.
        offset: of the block in the stored tensor.
        stacked: dimensions in front that ``data`` does not have: layers of one name.
    """

    data: Tensor
    offset: tuple[int, ...]
    stacked: int

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of the block, with all dimensions of the stored tensor."""
        return (1,) * self.stacked + tuple(self.data.shape)

    def overlap(self, chunk: StoredChunk) -> tuple[Span, ...] | None:
        """What ``chunk`` has of the block, in each dimension of the stored tensor; None for
        nothing."""
        spans = tuple(
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(chunk.offsets, chunk.sizes, self.offset, self.extent, strict=True)
        )
        return spans if all(begin < end for begin, end in spans) else None

    def fill(self, source: Tensor, chunk: StoredChunk, spans: tuple[Span, ...]) -> None:
        """Take what :meth:`overlap` found of ``source``, which is all of ``chunk``."""
        to = window(spans, self.offset)
        self.data.view(self.extent)[to].copy_(source[window(spans, chunk.offsets)])

    def order(self) -> int:
        """When it is read: before all that is put together."""
        return -1

    def is_whole(self) -> bool:
        """Whether nothing of it came twice, and so nothing is missing. Not known of what is filled
        as it comes."""
        return True


def window(spans: Iterable[Span], origin: Sequence[int]) -> tuple[slice, ...]:
    """What ``spans`` are in a block at ``origin``."""
    return tuple(
        slice(begin - at, end - at) for (begin, end), at in zip(spans, origin, strict=True)
    )


class Matrix:
    """A weight ``[n, k]`` that a layer keeps as e4m3.

    Args:
        numbers, scales: e4m3 ``[n, k]`` and fp32 ``[n, groups]``, to be filled.
        number: among all of the model.
    """

    def __init__(self, numbers: Tensor, scales: Tensor, number: int) -> None:
        self._numbers, self._scales, self.number = numbers, scales, number
        self.begin, self.size = numbers.storage_offset(), numbers.numel()
        self._values: Tensor | None = None
        self.lacking = self.size

    @property
    def is_whole(self) -> bool:
        """Whether each element has come, once."""
        return self.lacking == 0

    def put(self, values: Tensor, view: Tensor, at: tuple[slice, ...]) -> None:
        """Take ``values``, which are ``view[at]``; ``view`` is one of the numbers, which says where
        they are alone."""
        if self._values is None:
            like = torch.empty(self._numbers.shape, dtype=values.dtype, device=view.device)
            self._values = like
        elif self._values.dtype != values.dtype:
            self._values = self._values.to(torch.promote_types(self._values.dtype, values.dtype))
        first = view.storage_offset() - self.begin
        self._values.as_strided(view.shape, view.stride(), first)[at].copy_(values)
        self.lacking -= values.numel()
        if self.lacking == 0:
            quantize_into(self._values, self._numbers, self._scales)
            self._values = None


@dataclass(frozen=True, slots=True)
class KeptPart(Part):
    """A :class:`Part` whose ``data`` is e4m3: a matrix or several, or blocks of them.

    Args:
        matrices: all of the layer, one behind the other in its memory.
    """

    matrices: Sequence[Matrix]

    def fill(self, source: Tensor, chunk: StoredChunk, spans: tuple[Span, ...]) -> None:
        """See :class:`Part`."""
        to = window(spans, self.offset)[self.stacked :]
        found = source[window(spans, chunk.offsets)].flatten(0, self.stacked)
        views: Iterable[Tensor] = [self.data]
        pieces: Iterable[Tensor] = [found]
        if self.data.dim() > 2:
            first, *to_rows = to
            views, pieces, to = self.data[first], found, tuple(to_rows)
        for view, piece in zip(views, pieces, strict=True):
            self.matrices[self._number_of(view)].put(piece, view, to)

    def order(self) -> int:
        """When it is read: with what else is of the same matrix."""
        return self.matrices[self._number_of(self.data)].number

    def is_whole(self) -> bool:
        """See :class:`Part`."""
        return all(matrix.is_whole for matrix in self.matrices)

    def _number_of(self, view: Tensor) -> int:
        """Which of the matrices a view begins in."""
        first = self.matrices[0]
        return (view.storage_offset() - first.begin) // first.size


def parts_of(model: Module, shards: Mapping[str, Iterable[Any]]) -> dict[str, list[Part]]:
    """Where ``shards`` of ``model``, megatron-core's ``ShardedTensor`` by stored name, go."""
    matrices: dict[int, list[Matrix]] = {}
    count = 0
    for layer in quantized(model).values():
        scale = layer.weight_scale
        of_layer = zip(
            layer.weight.detach().reshape(-1, *layer.weight.shape[-2:]),
            scale.reshape(-1, *scale.shape[-2:]),
            strict=True,
        )
        numbered = [Matrix(*each, number) for number, each in enumerate(of_layer, start=count)]
        matrices[_storage(layer.weight)] = numbered
        count += len(numbered)

    def part(shard: Any) -> Part:
        data = shard.data.detach()
        place = data, tuple(shard.global_offset), shard.prepend_axis_num
        if data.dtype != E4M3:
            return Part(*place)
        return KeptPart(*place, matrices[_storage(data)])

    return {name: [part(each) for each in of_name] for name, of_name in shards.items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
