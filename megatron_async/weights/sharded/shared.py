"""Shards in memory that a trainer's ranks and an engine's both see: GPU memory by CUDA IPC, and
host memory as files in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_async.codec import from_plain
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.weights.sharded.checksum import checksum
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.plan import PLANS, TrainerRank
from megatron_async.weights.sharded.take import Moves, check_replicas, check_sum, moves_of
from megatron_async.weights.shared_memory import OpenedWeights, SharedWeights, open_weights
from megatron_async.weights.tensor_info import announced, weights_of

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel


class ShardedWeights:
    """One trainer rank's side. See :class:`SharedWeights` for what becomes of the memory.

    Args:
        tensors: this rank's, by the names of its own modules.
        layout: this rank's place.
        checksums: say with each export what each tensor's bytes add up to, which the engine's ranks
            compare before the first copy.
        readers: ranks of the engine. Handles of CUDA tensors are for one reader each.

    Raises:
        CheckpointError: as :class:`SharedWeights`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        layout: TrainerLayout,
        *,
        checksums: bool = False,
        readers: int = 1,
    ) -> None:
        if readers < 1:
            raise ConfigError(f"readers={readers} must be at least 1")
        self._tensors = weights_of(tensors)
        self._layout, self._checksums, self._readers = layout, checksums, readers
        self._shared = SharedWeights(self._tensors)

    def export(self) -> dict[str, Any]:
        """Handles of the tensors as they are now, in JSON's types. Those of all ranks of the
        trainer go to :func:`open_sharded`, for one update.

        Raises:
            CheckpointError: as :meth:`SharedWeights.export`.
        """
        weights = [self._shared.export()]
        if weights[0]["kind"] == "cuda":
            weights += [self._shared.export() for _ in range(1, self._readers)]
        sums = None
        if self._checksums:
            sums = {name: checksum(tensor) for name, tensor in self._tensors.items()}
        return {"layout": self._layout.to_json(), "weights": weights, "checksums": sums}

    def close(self) -> None:
        """Files in memory go away with their last readers."""
        self._shared.close()

    def __enter__(self) -> ShardedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Exported(NamedTuple):
    """What a trainer rank has exported; see :meth:`ShardedWeights.export`."""

    layout: TrainerLayout
    weights: list[dict[str, Any]]
    checksums: dict[str, str] | None

    @classmethod
    def from_json(cls, data: Any) -> Exported:
        """Raises CheckpointError for what is none."""
        try:
            found: Exported = from_plain([data[name] for name in cls._fields], cls)
            if not found.weights:
                raise ValueError("no weights")
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            said = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"these are no handles of sharded weights: {said}") from None
        return found

    def of_reader(self, reader: int) -> dict[str, Any]:
        """The handles for a rank of the engine."""
        if self.weights[0].get("kind") != "cuda":
            return self.weights[0]
        if reader >= len(self.weights):
            raise CheckpointError(
                f"rank {reader} of the engine has no handles of the trainer's GPU memory: give "
                f"ShardedWeights readers={reader + 1} or more"
            )
        return self.weights[reader]


def open_moves(
    model: GPTModel,
    handles: Sequence[Any],
    *,
    reader: int,
    all_parameters: bool,
    allow_non_finite_weights: bool,
) -> Moves:
    """What rank ``reader`` of an engine takes of trainer ranks' memory. With checksums it reads
    all of each tensor that it takes a part of, and else its own part alone.

    Raises:
        CheckpointError: these are no handles, what they name is not there, does not fit, is not
            finite, or has another checksum.
    """
    exported = [Exported.from_json(handle) for handle in handles]
    own = [each.of_reader(reader) for each in exported]
    ranks = [
        TrainerRank(each.layout, tuple(announced(handles.get("tensors"))))
        for each, handles in zip(exported, own, strict=True)
    ]
    plan = PLANS.plan(model, ranks, reader=reader, all_parameters=all_parameters)
    opened = {
        number: open_weights(handles)
        for number, handles in enumerate(own)
        # Handles of GPU memory are opened once each, so that it can be given back.
        if number in plan.slices or handles.get("kind") == "cuda"
    }
    for number, name in dict.fromkeys(
        (n, each.name) for n in plan.slices for each in plan.slices[n]
    ):
        sums = exported[number].checksums
        if sums is not None:
            check_sum(number, name, opened[number][name], sums.get(name))
    check_replicas(plan, [each.checksums for each in exported])
    files = [each for each in opened.values() if isinstance(each, OpenedWeights)]
    moves = Moves(list(moves_of(plan, opened)), files)
    moves.check(allow_non_finite_weights=allow_non_finite_weights)
    return moves
