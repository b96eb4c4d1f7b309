"""An engine rank's side of a :class:`~megatron_async.weights.sharded.group.ShardGroup`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoint.targets import Target
from megatron_async.codec import parse_json
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.sharded.buckets import Bucket, buckets_of, parts_of
from megatron_async.weights.sharded.group import (
    Asked,
    Meeting,
    agree,
    give_to,
    room_for,
    tell,
)
from megatron_async.weights.sharded.plan import PLANS, TrainerRank
from megatron_async.weights.sharded.take import Move, Moves

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

_joined: weakref.WeakKeyDictionary[GPTModel, tuple[Meeting, WeightGroup]]
_joined = weakref.WeakKeyDictionary()
"""The group that each model of this process gets its weights by, also when it is over: its trainer
makes another one."""


def receive_moves(
    model: GPTModel,
    handles: Any,
    *,
    reader: int,
    readers: int,
    all_parameters: bool,
    allow_non_finite_weights: bool,
) -> Moves:
    """What rank ``reader`` of an engine's ``readers`` takes, gathered in memory of its own.

    Raises:
        CheckpointError: it does not fit, is not finite, or has another checksum, or some other rank
            refuses, has ended, or does not come.
    """
    meeting = Meeting.from_json(handles)
    if meeting.engine_ranks != readers:
        raise CheckpointError(
            f"the trainer's ShardGroup has engine_ranks={meeting.engine_ranks}, and the engine has "
            f"{readers}"
        )
    group = _join(model, meeting, reader)
    receiving = _Receiving(model, meeting, group, reader)
    return receiving.run(all_parameters, allow_non_finite_weights)


def _join(model: GPTModel, meeting: Meeting, reader: int) -> WeightGroup:
    last = _joined.get(model)
    if last is not None and last[0] == meeting:
        return last[1]
    if last is not None:
        last[1].close()
        del _joined[model]
    device = next(model.parameters()).device if meeting.backend == "nccl" else "cpu"
    try:
        group = meeting.join(meeting.trainers + reader, device)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    _joined[model] = meeting, group
    return group


class Coming(NamedTuple):
    """What a rank is about to receive.

    Args:
        targets: by the whole tensor's name where its share goes in the end.
        staged: memory for each share meanwhile.
        buckets: by the trainer's rank.
        room: for one bucket at a time.
    """

    targets: dict[str, Target]
    staged: dict[str, Tensor]
    buckets: dict[int, list[Bucket]]
    room: Tensor


NOTHING = Coming({}, {}, {}, torch.empty(0))


class _Receiving:
    """One update."""

    def __init__(self, model: GPTModel, meeting: Meeting, group: WeightGroup, reader: int) -> None:
        self._model, self._meeting, self._group, self._reader = model, meeting, group, reader

    def run(self, all_parameters: bool, allow_non_finite_weights: bool) -> Moves:
        """What came, checked, on all ranks."""
        trainers = range(self._meeting.trainers)
        said = [tell(self._group, b"", root=trainer) for trainer in trainers]
        coming, refusal = NOTHING, None
        try:
            coming = self._prepare(said, all_parameters)
        except (CheckpointError, ValueError, RuntimeError) as error:  # no memory is the last
            refusal = error
        self._ask(coming)
        agree(self._group, self._meeting, refusal)
        wrong = [self._receive(n, coming) for n in self._meeting.trainers_of(self._reader)]
        refusal = next((error for error in wrong if error is not None), None)
        moves = Moves(
            [
                Move(name, target.view.detach(), coming.staged[name])
                for name, target in coming.targets.items()
            ]
        )
        try:
            moves.check(allow_non_finite_weights=allow_non_finite_weights)
        except CheckpointError as error:
            refusal = refusal or error
        agree(self._group, self._meeting, refusal)
        return moves

    def _prepare(self, said: list[bytes], all_parameters: bool) -> Coming:
        """Plan, and take memory."""
        ranks = [TrainerRank.from_json(parse_json(each)) for each in said]
        reader, limit = self._reader, self._meeting.bucket_bytes
        plan = PLANS.plan(self._model, ranks, reader=reader, all_parameters=all_parameters)
        staged = {
            name: torch.empty_like(target.view, memory_format=torch.contiguous_format)
            for name, target in plan.targets.items()
        }
        buckets = {}
        for trainer, slices in plan.slices.items():
            dtypes = {info.name: info.dtype for info in ranks[trainer].tensors}
            parts = parts_of(slices, dtypes, limit)
            checksums = self._meeting.checksums
            buckets[trainer] = buckets_of(parts, dtypes, limit, checksums=checksums)
        room = room_for(self._group, [each for some in buckets.values() for each in some])
        return Coming(plan.targets, staged, buckets, room)

    def _ask(self, coming: Coming) -> None:
        """Tell each rank of the trainer what is wanted of it."""
        for trainer in self._meeting.trainers_of(self._reader):
            some = coming.buckets.get(trainer, ())
            slices = [packed.slice for bucket in some for packed in bucket.packed]
            boxes = [(each.name, each.start, each.sizes) for each in slices]
            asked = Asked(boxes, self._meeting.bucket_bytes, self._meeting.checksums)
            give_to(self._group, trainer, asked.to_bytes())

    def _receive(self, trainer: int, coming: Coming) -> CheckpointError | None:
        """Take the buckets of a trainer's rank; what is wrong with one of them."""
        refusal = None
        for bucket in coming.buckets.get(trainer, ()):
            self._group.receive_from(trainer, coming.room[: bucket.nbytes])
            name = bucket.wrong(coming.room)
            if name is not None and refusal is None:
                refusal = CheckpointError(
                    f"the new {name} of trainer rank {trainer} has another checksum than it was "
                    "sent with: its values have changed on the way"
                )
            for each in bucket.packed:
                share = coming.staged[each.slice.target]
                each.slice.into(share).copy_(each.view(coming.room))
        return refusal
