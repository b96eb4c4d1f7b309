"""The messages by which all ranks get new weights: each reads its share of a directory, or of the
tensors of a trainer's ranks, or rank 0 sends whole tensors.

What is said of tensors is checked on all ranks before anything is sent, so that what does not fit
leaves the old weights everywhere. Then each rank copies its share of each tensor to where the old
one is (:mod:`megatron_async.weights.broadcast`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_async.errors import CheckpointError, IntegrityError, MegatronAsyncError
from megatron_async.ranks.channel import RING_BYTES
from megatron_async.ranks.messages import (
    AwaitTensors,
    Message,
    ReadShards,
    ReadWeights,
    ReplaceWeights,
)
from megatron_async.weights.broadcast import Room, receive, room_to_send, send
from megatron_async.weights.place import place
from megatron_async.weights.source import AnySource, ShareSource, source_of
from megatron_async.weights.targets import Names
from megatron_async.weights.tensor_info import TensorInfo, infos_of

Replace = Callable[[], None]

MOST_HANDLES_BYTES = RING_BYTES // 2
"""A message to all ranks has room for them."""


class Group(Protocol):
    """What is needed of a ``RankGroup``."""

    def tell(self, message: Message) -> None: ...

    def await_answers(self) -> object: ...

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
        source: a directory that all ranks have, a source of shares, or one of whole tensors.
        read: reads rank 0's share of one of the first two.

    Raises:
        CheckpointError: they do not fit on some rank.
    """
    try:
        found = source_of(source)
        if isinstance(found, ShareSource) or found.each_rank_reads:
            message = _how_to_read(found, allow_non_finite_weights, all_parameters)
            return _on_all(group, _read_everywhere(group, message, read))
        placement = place(
            model,
            found.read(model),
            whole=True,
            allow_non_finite_weights=allow_non_finite_weights,
            all_parameters=all_parameters,
        )
        room = room_to_send(placement, next(model.parameters()).device)
        infos = infos_of(placement.tensors)
        _have_awaited(group, [info.to_json() for info in infos], all_parameters)
    except CheckpointError:
        _have_awaited(group, [], False)  # what others have read, or have room for
        raise
    return _on_all(group, lambda: send(placement, room))


def _how_to_read(
    source: AnySource, allow_non_finite_weights: bool, all_parameters: bool
) -> Message:
    """What another rank finds its share by: a directory by its path, which is whole."""
    if isinstance(source, ShareSource):
        told = source.told()
        if len(told) > MOST_HANDLES_BYTES:
            raise CheckpointError(
                f"the handles of a trainer's shards are {len(told):,} bytes, more than the "
                f"{MOST_HANDLES_BYTES:,} that ranks are told: send them by a ShardGroup"
            )
        return ReadShards(told, allow_non_finite_weights, all_parameters)
    return ReadWeights(str(source.path), allow_non_finite_weights)


def _read_everywhere(group: Group, message: Message, read: Callable[[], Replace]) -> Replace:
    group.tell(message)
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
    names = Names.of(model, [info.name for info in infos], whole=True)
    shares = names.shares(infos, all_parameters=all_parameters)
    room = Room(infos, next(model.parameters()).device)
    return lambda: receive(infos, shares, room)


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
