"""Whole tensors from rank 0 to all ranks of a model. Each rank copies its share to where the old
one is, as it comes: nothing but one tensor is gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.errors import CheckpointError
from megatron_async.models import parallel
from megatron_async.weights.place import Placement
from megatron_async.weights.targets import Shares
from megatron_async.weights.tensor_info import TensorInfo


class Room:
    """Memory of ``device`` for one of ``tensors`` at a time.

    Raises:
        CheckpointError: there is none for the largest.
    """

    def __init__(self, tensors: Sequence[Tensor | TensorInfo], device: torch.device) -> None:
        self.device = device
        size = max((each.nbytes for each in tensors), default=0)
        try:
            with torch.inference_mode():
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CheckpointError(
                f"there is no room on {device} for one of the new weights, of {size:,} bytes, "
                f"beside those that are served: {str(error).splitlines()[0]}"
            ) from error

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a tensor over the memory; what was there before is gone."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[:size].view(dtype).view(torch.Size(shape))


def room_to_send(placement: Placement, device: torch.device) -> Room:
    """Room for those of rank 0's tensors that cannot be sent from where they are."""
    tensors = placement.tensors.values()
    return Room([tensor for tensor in tensors if not _lies_well(tensor, device)], device)


def send(placement: Placement, room: Room) -> None:
    """Send all as rank 0, and copy this rank's shares."""
    with torch.inference_mode():
        for tensor, share in zip(placement.tensors.values(), placement.shares, strict=True):
            there = tensor.detach()
            if not _lies_well(there, room.device):
                there = room.tensor(tensor.dtype, tensor.shape).copy_(there)
            _broadcast(there)
            if share is not None:
                share.copy_from(there)


def receive(infos: Sequence[TensorInfo], shares: Shares, room: Room) -> None:
    """Take all as another rank, and copy this rank's shares."""
    with torch.inference_mode():
        for info, share in zip(infos, shares, strict=True):
            there = room.tensor(info.dtype, info.shape)
            _broadcast(there)
            if share is not None:
                share.copy_from(there)


def _lies_well(tensor: Tensor, device: torch.device) -> bool:
    """Whether it can be sent from where it is."""
    return tensor.device == device and tensor.is_contiguous()


def _broadcast(tensor: Tensor) -> None:
    """Broadcast a contiguous tensor of rank 0 to all ranks."""
    place = parallel.current()
    assert place is not None
    if tensor.numel():
        values = tensor.view(-1).view(torch.uint8)
        dist.broadcast(values, src=place.leader, group=place.everyone)
