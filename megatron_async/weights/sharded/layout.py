"""A trainer rank's place among others, and where its tensors lie in those of the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from megatron_async.checkpoint.targets import EMBEDDING, OUTPUT, Split, Stage, TensorParallel
from megatron_async.codec import from_plain
from megatron_async.errors import CheckpointError, ConfigError, shown
from megatron_async.request.parameter_checks import as_integer
from megatron_async.weights.targets import blocks_of, is_of_one_expert, with_expert_number
from megatron_async.weights.tensor_info import TensorInfo

Place = tuple[int, ...]
"""An index, or a length, in each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """A trainer rank's place, in megatron-core's words.

    Args:
        tensor_rank, tensor_size: of tensor parallelism.
        expert_rank, expert_size: of expert parallelism: each rank has some experts.
        expert_tensor_rank, expert_tensor_size: of those that share each of these; None is as of
            tensor parallelism.
        first_layer: how many layers the pipeline stages before this one have. Names of virtual
            stages may have the whole model's numbers, with 0 here.
        vocab_size: rows of embedding and output layer, over all ranks; those behind are padding,
            and are left out. None: there is none.

    Raises:
        ConfigError: a value is no integer, or out of range, such as a rank that is not below its
            size.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int | None = None
    expert_tensor_size: int | None = None
    first_layer: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = as_integer(value)
            if number is None and (value is not None or field.default is not None):
                raise ConfigError(f"{field.name}={shown(value)} must be an integer")
            object.__setattr__(self, field.name, number)  # plain, where it is one of NumPy's
        own = self.parallel
        for kind, rank, size in (
            ("tensor", own.rank, own.size),
            ("expert", own.expert_rank, own.expert_ranks),
            ("expert_tensor", own.expert_tensor_rank, own.expert_tensor_ranks),
        ):
            if not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank={rank} must be below {kind}_size={size}")
        if self.first_layer < 0:
            raise ConfigError(f"first_layer={self.first_layer} must not be negative")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(
                f"vocab_size={self.vocab_size} must be at least 1, or None for no padding"
            )

    @classmethod
    def of(cls, model: Any, *, vocab_size: int | None = None) -> TrainerLayout:
        """The place of this process, by megatron-core's parallel state, and of its ``model``."""
        own, layers = TensorParallel.current(), list(model.decoder.layers)
        return cls(
            tensor_rank=own.rank,
            tensor_size=own.size,
            expert_rank=own.expert_rank,
            expert_size=own.expert_ranks,
            expert_tensor_rank=own.expert_tensor_rank,
            expert_tensor_size=own.expert_tensor_ranks,
            first_layer=layers[0].layer_number - 1 if layers else 0,
            vocab_size=vocab_size,
        )

    @property
    def parallel(self) -> TensorParallel:
        """The place among ranks that share layers and experts."""
        rank, size = self.expert_tensor_rank, self.expert_tensor_size
        return TensorParallel(
            self.tensor_rank,
            self.tensor_size,
            self.expert_rank,
            self.expert_size,
            self.tensor_rank if rank is None else rank,
            self.tensor_size if size is None else size,
        )

    @property
    def sizes(self) -> dict[str, int | None]:
        """What all ranks of a trainer have alike."""
        own = self.parallel
        return {
            "tensor_size": own.size,
            "expert_size": own.expert_ranks,
            "expert_tensor_size": own.expert_tensor_ranks,
            "vocab_size": self.vocab_size,
        }

    def to_json(self) -> dict[str, Any]:
        """The same in plain types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> TrainerLayout:
        """The inverse; raises CheckpointError for what is none."""
        try:
            found: TrainerLayout = from_plain(data, cls)
        except (ValueError, ConfigError) as error:
            raise CheckpointError(f"{str(data)[:80]!r} is no TrainerLayout: {error}") from None
        return found


class Piece(NamedTuple):
    """A box of a whole tensor, and where it begins in a rank's tensor."""

    local: Place
    whole: Place
    sizes: Place


def pieces_of(shape: Place, splits: tuple[Split, ...]) -> tuple[Piece, ...]:
    """Where a rank's tensor of ``shape`` lies in the whole one that is divided by ``splits``."""
    runs = [[(0, 0, length)] for length in shape]
    for split in splits:
        runs[split.dimension] = split.runs(shape[split.dimension])
    boxes = product(*runs)
    return tuple(
        Piece(tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box))
        for box in boxes
    )


class Held(NamedTuple):
    """What trainer rank ``rank`` has of a whole tensor.

    Args:
        name: of its own.
        whole: the whole tensor.
        pieces: those of its tensor, in its order.
    """

    rank: int
    name: str
    whole: TensorInfo
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """What must be known of the model that is served.

    Args:
        gated: its MLPs have a gate.
        experts: of a layer; 0 for none.
        tied: the output layer is the embedding.
    """

    gated: bool
    experts: int
    tied: bool

    @classmethod
    def of(cls, model: Any) -> Served:
        """Ask a model."""
        config = model.config
        tied: bool = model.share_embeddings_and_output_weights
        return cls(config.gated_linear_unit, config.num_moe_experts or 0, tied)

    def whole_name(self, name: str, layout: TrainerLayout) -> str:
        """What a trainer rank's ``name`` is called in the whole model.

        Raises:
            CheckpointError: the experts do not divide by the trainer's ranks.
        """
        if layout.first_layer:
            name = Stage(layout.first_layer, stages=2).whole(name)
        if name == OUTPUT and self.tied:
            return EMBEDDING
        if layout.expert_size > 1 and is_of_one_expert(name):
            if self.experts % layout.expert_size:
                raise CheckpointError(
                    f"{self.experts} experts do not divide by expert_size={layout.expert_size}"
                )
            each = self.experts // layout.expert_size
            name = with_expert_number(name, lambda number: layout.expert_rank * each + number)
        return name

    def held(
        self,
        rank: int,
        info: TensorInfo,
        layout: TrainerLayout,
        whole_shapes: Mapping[str, Place],
    ) -> Held:
        """What a trainer rank has of a whole tensor.

        Args:
            info: of its own tensor.
            whole_shapes: those of the served model. A tensor that has it is not divided, also where
                other modules of megatron-core divide it, such as the down projections of
                multi-latent attention.

        Raises:
            CheckpointError: its shape does not divide by blocks.
        """
        name, shape = self.whole_name(info.name, layout), info.shape
        groups = blocks_of(name, gated=self.gated)
        splits = layout.parallel.splits(name, groups, of_one_expert=is_of_one_expert(name))
        is_vocabulary = name in (EMBEDDING, OUTPUT)
        if whole_shapes.get(name) == shape and not is_vocabulary:
            splits = ()
        whole = list(shape)
        for split in splits:
            if split.dimension >= len(shape) or shape[split.dimension] % split.groups:
                raise CheckpointError(
                    f"{info.name} of trainer rank {rank} has shape {shape}, which has no "
                    f"{split.groups} equal blocks in dimension {split.dimension}"
                )
            whole[split.dimension] *= split.size
        pieces = pieces_of(shape, splits)
        if is_vocabulary and layout.vocab_size is not None:
            if whole[0] < layout.vocab_size:
                raise CheckpointError(
                    f"{info.name} has {whole[0]:,} rows over all ranks of the trainer, which are "
                    f"fewer than vocab_size={layout.vocab_size:,}"
                )
            whole[0] = layout.vocab_size
            pieces = _without_padding(pieces, layout.vocab_size)
        return Held(rank, info.name, TensorInfo(name, info.dtype, tuple(whole)), pieces)


def _without_padding(pieces: tuple[Piece, ...], rows: int) -> tuple[Piece, ...]:
    """What of the pieces is in the first ``rows`` of the whole tensor."""
    kept = ((piece, min(piece.sizes[0], rows - piece.whole[0])) for piece in pieces)
    return tuple(p._replace(sizes=(count, *p.sizes[1:])) for p, count in kept if count > 0)
