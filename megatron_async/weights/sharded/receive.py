"""An engine rank's side of a :class:`~megatron_async.weights.sharded.group.ShardGroup`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.codec import parse_json
from megatron_async.errors import CheckpointError
from megatron_async.weights.group import WeightGroup
from megatron_async.weights.sharded.buckets import buckets_of, parts_of
from megatron_async.weights.sharded.group import Asked, Meeting, agree, give_to, tell
from megatron_async.weights.sharded.plan import PLANS, ReshardPlan, Slice, TrainerRank
from megatron_async.weights.sharded.take import Move, Moves

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

_joined: weakref.WeakKeyDictionary[GPTModel, tuple[Meeting, WeightGroup]]
_joined = weakref.WeakKeyDictionary()
"""The group that each model of this process gets its weights by."""


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
            refuses, or has ended.
        ConfigError: the trainer does not come.
    """
    meeting = Meeting.from_json(handles)
    if meeting.engine_ranks != readers:
        raise CheckpointError(
            f"the trainer's ShardGroup has engine_ranks={meeting.engine_ranks}, and the engine has "
            f"{readers}"
        )
    group = _join(model, meeting, reader)
    receiving = _Receiving(model, meeting, group, reader)
    try:
        return receiving.run(all_parameters, allow_non_finite_weights)
    finally:
        if group.is_over:
            del _joined[model]


def _join(model: GPTModel, meeting: Meeting, reader: int) -> WeightGroup:
    last = _joined.get(model)
    if last is not None and last[0] == meeting:
        return last[1]
    if last is not None:
        last[1].close()
        del _joined[model]
    device = next(model.parameters()).device if meeting.backend == "nccl" else "cpu"
    group = meeting.join(meeting.trainers + reader, device)
    _joined[model] = meeting, group
    return group


class _Receiving:
    """One update."""

    def __init__(self, model: GPTModel, meeting: Meeting, group: WeightGroup, reader: int) -> None:
        self._model, self._meeting, self._group, self._reader = model, meeting, group, reader

    def run(self, all_parameters: bool, allow_non_finite_weights: bool) -> Moves:
        """What came, checked, on all ranks."""
        trainers = range(self._meeting.trainers)
        said = [tell(self._group, b"", root=trainer) for trainer in trainers]
        refusal: Exception | None = None
        plan, staged = ReshardPlan({}, {}, []), dict[str, Tensor]()
        ranks: list[TrainerRank] = []
        try:
            ranks = [TrainerRank.from_json(parse_json(each)) for each in said]
            plan = PLANS.plan(
                self._model, ranks, reader=self._reader, all_parameters=all_parameters
            )
            staged = {
                name: torch.empty_like(target.view, memory_format=torch.contiguous_format)
                for name, target in plan.targets.items()
            }
        except (CheckpointError, ValueError, RuntimeError) as error:  # no memory is the last
            refusal = error
        dtypes = [{info.name: info.dtype for info in rank.tensors} for rank in ranks]
        asked = {
            trainer: list(parts_of(slices, dtypes[trainer], self._meeting.bucket_bytes))
            for trainer, slices in plan.slices.items()
        }
        for trainer in self._meeting.trainers_of(self._reader):
            boxes = [(each.name, each.start, each.sizes) for each in asked.get(trainer, ())]
            wanted = Asked(boxes, self._meeting.bucket_bytes, self._meeting.checksums)
            give_to(self._group, trainer, wanted.to_bytes())
        agree(self._group, self._meeting, refusal)
        for trainer in self._meeting.trainers_of(self._reader):
            if trainer in asked:
                wrong = self._receive(trainer, asked[trainer], dtypes[trainer], staged)
                refusal = refusal or wrong
        moves = Moves(
            [Move(n, target.view.detach(), staged[n]) for n, target in plan.targets.items()]
        )
        try:
            moves.check(allow_non_finite_weights=allow_non_finite_weights)
        except CheckpointError as error:
            refusal = refusal or error
        agree(self._group, self._meeting, refusal)
        return moves

    def _receive(
        self,
        trainer: int,
        parts: list[Slice],
        dtypes: dict[str, torch.dtype],
        staged: dict[str, Tensor],
    ) -> CheckpointError | None:
        """Take the buckets of a trainer's rank; what is wrong with one of them."""
        meeting, refusal = self._meeting, None
        buckets = buckets_of(parts, dtypes, meeting.bucket_bytes, checksums=meeting.checksums)
        size = max(each.nbytes for each in buckets)
        room = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        for bucket in buckets:
            self._group.receive_from(trainer, room[: bucket.nbytes])
            name = bucket.wrong(room)
            if name is not None and refusal is None:
                refusal = CheckpointError(
                    f"the new {name} of trainer rank {trainer} has another checksum than it was "
                    "sent with: its values have changed on the way"
                )
            for each in bucket.packed:
                share = staged[each.slice.target]
                each.slice.into(share).copy_(each.view(room))
        return refusal
