"""New weights for all ranks: each reads its share of a directory, or rank 0 sends whole tensors.

What is said of tensors is checked on all ranks before anything is sent, so that what does not fit
leaves the old weights everywhere. Then each rank copies its share of each tensor to where the old
one is, as it comes: nothing but one tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.checkpoint.targets import Target
from megatron_async.checkpoint.update import is_file, read_file
from megatron_async.checkpoint.whole_weights import check_whole, shares_of
from megatron_async.errors import CheckpointError, IntegrityError, MegatronAsyncError
from megatron_async.ranks.messages import AwaitTensors, Message, ReadWeights, ReplaceWeights
from megatron_async.weight_transfer.tensor_info import TensorInfo, infos_of

Replace = Callable[[], None]
LEADER = 0


class Group(Protocol):
    """What is needed of a ``RankGroup``."""

    def tell(self, message: Message) -> None: ...

    def await_answers(self) -> None: ...

    def explain(self, error: RuntimeError) -> RuntimeError: ...


def read_weights(
    group: Group,
    model: Any,
    source: object,
    read: Callable[[], Replace],
    *,
    allow_non_finite_weights: bool,
    all_parameters: bool,
) -> Replace:
    """Have new weights read and checked on all ranks. Calling the result replaces them everywhere;
    then nothing may be in flight.

    Args:
        model: rank 0's.
        source: a directory that all ranks have, a file, or a state dict of whole tensors.
        read: reads rank 0's share of a directory.

    Raises:
        CheckpointError: they do not fit on some rank.
    """
    try:
        if isinstance(source, (str, Path)) and not is_file(source):
            return _on_all(group, _read_everywhere(group, source, read, allow_non_finite_weights))
        tensors, shares = check_whole(
            model,
            read_file(source) if isinstance(source, (str, Path)) else source,
            allow_non_finite_weights=allow_non_finite_weights,
            all_parameters=all_parameters,
        )
        device = next(model.parameters()).device
        moved = [tensor for tensor in tensors.values() if not _lies_well(tensor, device)]
        room = Room(moved, device)
        _have_awaited(group, [info.to_json() for info in infos_of(tensors)], all_parameters)
    except CheckpointError:
        _have_awaited(group, [], False)  # what others have read, or have room for
        raise
    return _on_all(group, lambda: _send(tensors, shares, room))


def _read_everywhere(
    group: Group, source: str | Path, read: Callable[[], Replace], allow_non_finite_weights: bool
) -> Replace:
    group.tell(ReadWeights(str(source), allow_non_finite_weights))
    failed: MegatronAsyncError | None = None
    try:
        replace = read()
    except MegatronAsyncError as error:
        failed = error
    group.await_answers()
    if failed is not None:
        raise failed
    return replace


def _have_awaited(group: Group, tensors: list[list[Any]], all_parameters: bool) -> None:
    group.tell(AwaitTensors(tensors, all_parameters))
    group.await_answers()


def await_tensors(model: Any, tensors: Sequence[Any], *, all_parameters: bool) -> Replace:
    """Check, at another rank, what is said of tensors; calling the result takes them.

    Raises:
        CheckpointError: as :func:`read_weights`.
    """
    infos = [TensorInfo.from_json(each) for each in tensors]
    shares = shares_of(model, infos, all_parameters=all_parameters)
    room = Room(infos, next(model.parameters()).device)
    return lambda: _receive(infos, shares, room)


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


def _on_all(group: Group, replace: Replace) -> Replace:
    def replace_on_all() -> None:
        group.tell(ReplaceWeights())
        try:
            _with_reason(group, replace)
            group.await_answers()
        except CheckpointError as error:
            raise IntegrityError(f"some ranks have new weights, some old ones: {error}") from error

    return replace_on_all


def _with_reason(group: Group, replace: Replace) -> None:
    try:
        replace()
    except RuntimeError as error:
        raise group.explain(error) from error


def _send(tensors: Mapping[str, Tensor], shares: Sequence[Target | None], room: Room) -> None:
    with torch.inference_mode():
        for tensor, share in zip(tensors.values(), shares, strict=True):
            there = tensor.detach()
            if not _lies_well(there, room.device):
                there = room.tensor(tensor.dtype, tensor.shape).copy_(there)
            _broadcast(there)
            if share is not None:
                share.copy_from(there)


def _receive(infos: Sequence[TensorInfo], shares: Sequence[Target | None], room: Room) -> None:
    with torch.inference_mode():
        for info, share in zip(infos, shares, strict=True):
            there = room.tensor(info.dtype, info.shape)
            _broadcast(there)
            if share is not None:
                share.copy_from(there)


def _lies_well(tensor: Tensor, device: torch.device) -> bool:
    """It can be sent from where it is."""
    return tensor.device == device and tensor.is_contiguous()


def _broadcast(tensor: Tensor) -> None:
    """Broadcast a contiguous tensor of rank 0 to all ranks."""
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=LEADER)
