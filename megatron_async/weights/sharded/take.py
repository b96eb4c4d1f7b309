"""Slices of a trainer's tensors are checked, and copied into an engine rank's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoint.reading.finite import check_finite
from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.errors import CheckpointError
from megatron_async.weights.sharded.checksum import checksum
from megatron_async.weights.sharded.plan import ReshardPlan
from megatron_async.weights.shared_memory import OpenedWeights


class Move(NamedTuple):
    """``values`` of the whole tensor ``name`` go to ``target``, a view of a parameter."""

    name: str
    target: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Moves:
    """All that a rank takes. ``opened``: files that must not be cut short meanwhile."""

    moves: Sequence[Move]
    opened: Sequence[OpenedWeights] = field(default=())

    def check(self, *, allow_non_finite_weights: bool) -> None:
        """Raise CheckpointError where values are not finite in the model's dtype."""
        self.check_files()
        if not allow_non_finite_weights:
            each = ((move.name, move.values, move.target.dtype) for move in self.moves)
            check_finite("the new weights", each)

    def check_files(self) -> None:
        """Raise CheckpointError if a file was cut short: a look at it would end the process."""
        for file in self.opened:
            file.check()

    def copy(self) -> None:
        """Fill the targets.

        Raises:
            CheckpointError: the first copy failed, and nothing was copied.
        """
        self.check_files()
        # Only in inference mode may inference tensors be written to; others may be as well.
        with torch.inference_mode():
            for number, (name, target, values) in enumerate(self.moves):
                try:
                    target.copy_(values)
                except RuntimeError as error:
                    if number:
                        raise
                    raise CheckpointError(
                        f"the new {name} cannot be copied, and nothing was: {one_line(error)}"
                    ) from error


def moves_of(plan: ReshardPlan, tensors: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Move]:
    """The copies of a plan from tensors of the trainer's ranks, which are read where they lie."""
    for rank, slices in plan.slices.items():
        for each in slices:
            target = plan.targets[each.target].view.detach()
            yield Move(each.target, each.into(target), each.of(tensors[rank][each.name]))


def check_replicas(plan: ReshardPlan, sums: Sequence[Mapping[str, str] | None]) -> None:
    """Raise CheckpointError where trainer ranks that should have the same do not, by the checksums
    of those that give any."""
    for same in plan.replicas:
        given = [(rank, name, each[name]) for rank, name in same if (each := sums[rank])]
        for rank, other, found in given[1:]:
            first, name, wanted = given[0]
            if found != wanted:
                raise CheckpointError(
                    f"{name} of trainer rank {first} and {other} of trainer rank {rank} should be "
                    "the same, and have other checksums"
                )


def check_sum(rank: int, name: str, tensor: Tensor, wanted: str | None) -> None:
    """Raise CheckpointError unless what came from a trainer's rank has its checksum."""
    if checksum(tensor) != wanted:
        raise CheckpointError(
            f"the new {name} of trainer rank {rank} has another checksum than the trainer gave "
            "it: its values have changed on the way"
        )
