"""Tensors that were announced by name, dtype and shape, and then come as plain broadcasts: the way
of vLLM's weight-transfer engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_async.weights.tensor_info import TensorInfo

BUFFER_BYTES = 1 << 30
"""A packed buffer is full once it has more bytes than these."""


class Group(Protocol):
    """A group of a trainer, rank 0, and the ranks of an engine."""

    device: torch.device

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the trainer's tensor into ``tensor``."""

    def close(self) -> None:
        """Leave the group."""


def receive_announced(
    group: Group,
    infos: Sequence[TensorInfo],
    *,
    packed: bool,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, Tensor]:
    """The announced tensors, in memory of their own.

    Args:
        packed: they come as bytes, one behind the other, in as few buffers as are full.
    """
    if not packed:
        return {
            info.name: group.broadcast(
                torch.empty(info.shape, dtype=info.dtype, device=group.device)
            )
            for info in infos
        }
    tensors: dict[str, Tensor] = {}
    for some in _buffers(infos, buffer_bytes):
        sizes = [info.nbytes for info in some]
        bytes_ = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        group.broadcast(bytes_)
        for info, part in zip(some, bytes_.split(sizes), strict=True):
            aligned = part.clone() if part.storage_offset() % info.dtype.itemsize else part
            tensors[info.name] = aligned.view(info.dtype).view(info.shape)
    return tensors


def send_announced(
    group: Group,
    tensors: Sequence[Tensor],
    *,
    packed: bool,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """The trainer's side of :func:`receive_announced`, with tensors in the announced order."""
    if not packed:
        for tensor in tensors:
            group.broadcast(tensor.detach().contiguous())
        return
    infos = [TensorInfo("", tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    rest = iter(tensors)
    for some in _buffers(infos, buffer_bytes):
        flat = [next(rest).detach().contiguous().view(-1).view(torch.uint8) for _ in some]
        group.broadcast(torch.cat(flat))


def _buffers(infos: Sequence[TensorInfo], size: int) -> Iterator[list[TensorInfo]]:
    """Which tensors come together."""
    some: list[TensorInfo] = []
    total = 0
    for info in infos:
        some.append(info)
        total += info.nbytes
        if total > size:
            yield some
            some, total = [], 0
    if some:
        yield some
