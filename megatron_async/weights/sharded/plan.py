"""Which slices of which trainer ranks' tensors go to which slices of an engine rank's parameters.

Both lie in whole tensors that nobody has: a slice is what the box of a trainer's rank and that of
the engine's have in common. Each rank of the engine plans for itself, from what all trainer ranks
say of their tensors.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.models import parallel
from megatron_async.models.quantized.linear import quantized
from megatron_async.weights.sharded.layout import (
    Held,
    Piece,
    Place,
    Served,
    TrainerLayout,
    pieces_of,
)
from megatron_async.weights.targets import Names
from megatron_async.weights.tensor_info import TensorInfo, announced

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel


class TrainerRank(NamedTuple):
    """What a trainer rank says before it sends anything."""

    layout: TrainerLayout
    tensors: tuple[TensorInfo, ...]

    def to_json(self) -> list[Any]:
        """The same in plain types."""
        return [self.layout.to_json(), [info.to_json() for info in self.tensors]]

    @classmethod
    def from_json(cls, data: Any) -> TrainerRank:
        """The inverse; raises CheckpointError for what is none."""
        if not isinstance(data, list) or len(data) != 2:
            raise CheckpointError(f"{str(data)[:80]!r} is no layout and tensors of a trainer rank")
        return cls(TrainerLayout.from_json(data[0]), tuple(announced(data[1])))


class Slice(NamedTuple):
    """A box of a trainer rank's tensor ``name``, and where it goes.

    Args:
        start: in the trainer rank's tensor.
        target: the whole tensor's name.
        target_start: in the engine rank's share of it.
        sizes: of the box.
    """

    name: str
    start: Place
    target: str
    target_start: Place
    sizes: Place

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the trainer rank's tensor."""
        return _box(tensor, self.start, self.sizes)

    def into(self, share: Tensor) -> Tensor:
        """A view of the engine rank's share."""
        return _box(share, self.target_start, self.sizes)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What one rank of an engine takes.

    Args:
        targets: by the whole tensor's name where its share goes.
        slices: by the trainer's rank, which together fill each target once.
        replicas: tensors, as a trainer's rank and a name, that have to be the same.
    """

    targets: dict[str, Target]
    slices: dict[int, list[Slice]]
    replicas: list[tuple[tuple[int, str], ...]]


def plan_for(
    model: GPTModel, ranks: Sequence[TrainerRank], *, reader: int, all_parameters: bool
) -> ReshardPlan:
    """The plan of an engine rank whose share ``model`` is.

    Args:
        reader: the rank's number: of several trainer ranks that have the same, each engine rank
            takes another one's.
        all_parameters: none of this rank's may be missing.

    Raises:
        CheckpointError: a name, a shape or a dtype does not fit, or some elements are nowhere.
    """
    _check_alike(ranks)
    if quantized(model):
        raise CheckpointError(
            "the model keeps FP8 or MXFP4 weights, which are quantized row by row, and shards have "
            "parts of rows: give whole tensors"
        )
    for info in (each for rank in ranks for each in rank.tensors):
        if info.dtype.is_floating_point and info.dtype.itemsize == 1:
            raise CheckpointError(
                f"the new {info.name} has dtype {info.dtype}, and shards have no scales: give them "
                "in 16 or 32 bits, or whole tensors"
            )
    served = Served.of(model)
    of_whole = [
        [served.whole_name(info.name, rank.layout) for info in rank.tensors] for rank in ranks
    ]
    whole = parallel.current() is not None
    names = Names.of(model, {name for each in of_whole for name in each}, whole=whole)
    if names.theirs:
        raise CheckpointError(
            "sharded weights have megatron-core's parameter names, and these are Hugging Face's; "
            "give those of the trainer's modules"
        )
    shapes = {name: tuple(target.shape) for name, target in names.targets.items()}
    held: dict[str, list[Held]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        for info in rank.tensors:
            each = served.held(number, info, rank.layout, shapes)
            held[each.whole.name].append(each)
    infos = [_agreed(each) for each in held.values()]
    shares = names.shares(infos, all_parameters=all_parameters)
    found = ReshardPlan({}, {}, [])
    for turn, (info, share) in enumerate(zip(infos, shares, strict=True), reader):
        if share is None:
            continue
        found.targets[info.name] = share
        regions = _by_region(held[info.name])
        for here, box in _fill(info, share, regions, turn):
            found.slices.setdefault(here, []).append(box)
        found.replicas.extend(tuple((h.rank, h.name) for h in same) for same in regions.values())
    return found


class Plans:
    """The last plan of each model in this process: a trainer's tensors stay what they are, so that
    the next update has the same."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[GPTModel, tuple[object, ReshardPlan]]
        self._last = weakref.WeakKeyDictionary()

    def plan(
        self, model: GPTModel, ranks: Sequence[TrainerRank], *, reader: int, all_parameters: bool
    ) -> ReshardPlan:
        """See :func:`plan_for`."""
        where = tuple(parameter.data_ptr() for parameter in model.parameters())
        key = (tuple(ranks), reader, all_parameters, where)
        last = self._last.get(model)
        if last is None or last[0] != key:
            made = plan_for(model, ranks, reader=reader, all_parameters=all_parameters)
            self._last[model] = last = (key, made)
        return last[1]


PLANS = Plans()


def _check_alike(ranks: Sequence[TrainerRank]) -> None:
    if not ranks:
        raise CheckpointError("there are no trainer ranks with new weights")
    first = ranks[0].layout.sizes
    for number, rank in enumerate(ranks):
        if rank.layout.sizes != first:
            raise CheckpointError(
                f"trainer ranks 0 and {number} are of other layouts: {first} and "
                f"{rank.layout.sizes}"
            )


def _agreed(held: Sequence[Held]) -> TensorInfo:
    """The whole tensor that ranks have parts of."""
    first = held[0]
    for other in held:
        if other.whole != first.whole:
            said = [
                f"{each.whole.dtype} {each.whole.shape} by trainer rank {each.rank}"
                for each in (first, other)
            ]
            raise CheckpointError(f"{first.whole.name} is {said[0]}, and {said[1]}")
    return first.whole


def _by_region(held: Sequence[Held]) -> dict[tuple[Piece, ...], list[Held]]:
    """Which ranks have the same part of a whole tensor."""
    regions: dict[tuple[Piece, ...], list[Held]] = defaultdict(list)
    for each in held:
        regions[each.pieces].append(each)
    return regions


def _fill(
    info: TensorInfo, share: Target, regions: Mapping[tuple[Piece, ...], list[Held]], turn: int
) -> list[tuple[int, Slice]]:
    """The slices that fill a share, each with the trainer's rank.

    Raises:
        CheckpointError: they leave elements out, or bring some twice.
    """
    found = []
    for own in pieces_of(tuple(share.view.shape), share.splits):
        for same in regions.values():
            held = same[turn % len(same)]
            for theirs in held.pieces:
                common = _common(own, theirs)
                if common is not None:
                    start, target_start, sizes = common
                    each = Slice(held.name, start, info.name, target_start, sizes)
                    found.append((held.rank, each))
    brought, wanted = sum(math.prod(each.sizes) for _, each in found), share.view.numel()
    if brought < wanted:
        raise CheckpointError(
            f"the new {info.name} lacks {wanted - brought:,} of the {wanted:,} elements of this "
            "rank's share; give what all ranks of the trainer have"
        )
    if brought > wanted:
        raise CheckpointError(
            f"trainer ranks have {info.name} in several ways, some of them as a whole; give each "
            "the same share"
        )
    return found


def _common(own: Piece, theirs: Piece) -> tuple[Place, Place, Place] | None:
    """Where what two boxes have in common begins in the trainer's tensor and in the engine's, and
    its sizes; None where that is nothing."""
    start, target_start, sizes = [], [], []
    for n, (mine, their) in enumerate(zip(own.whole, theirs.whole, strict=True)):
        first = max(mine, their)
        size = min(mine + own.sizes[n], their + theirs.sizes[n]) - first
        if size <= 0:
            return None
        start.append(theirs.local[n] + first - their)
        target_start.append(own.local[n] + first - mine)
        sizes.append(size)
    return tuple(start), tuple(target_start), tuple(sizes)


def _box(tensor: Tensor, start: Place, sizes: Place) -> Tensor:
    for dimension, (first, size) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor.narrow(dimension, first, size)
    return tensor
