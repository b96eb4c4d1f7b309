"""Where stored tensors go in the parameters of this tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from megatron_async.errors import CheckpointError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
"""Megatron's names of the two parameters that may be tied."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""New weights may have any of these dtypes, for parameters of any of these."""

# The dimension that megatron's linears and embeddings split; other parameters are replicated.
SPLIT_DIMENSION = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "core_attention.softmax_offset": 0,
    "linear_q_proj.weight": 0,
    "linear_q_down_proj.weight": 0,
    "linear_q_up_proj.weight": 0,
    "linear_kv_down_proj.weight": 0,
    "linear_kv_up_proj.weight": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
    "eh_proj.weight": 0,
}


def _whole(stored: torch.Tensor) -> torch.Tensor:
    return stored


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``, but that a NaN is the same as another."""
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_has_values(name: str, new: Any) -> None:
    """Raises CheckpointError unless ``new``, said to be weights, is a tensor with all values."""
    # Subclasses may hold their values in another way, or a share of them.
    if type(new) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"the new {name} is a {type(new).__name__}; give a torch.Tensor")
    if new.is_meta or new.is_nested or new.layout != torch.strided:
        kind = "meta" if new.is_meta else "nested" if new.is_nested else new.layout
        raise CheckpointError(f"the new {name} is a {kind} tensor; give one with all its values")


class Split(NamedTuple):
    """``dimension`` has ``groups`` blocks of equal size, and each of them ``size`` shares, of which
    this rank has one."""

    dimension: int
    groups: int
    size: int
    rank: int

    def share_of(self, stored: torch.Tensor) -> torch.Tensor:
        """This rank's share of all blocks."""
        sizes = list(stored.shape)
        sizes[self.dimension : self.dimension + 1] = [self.groups, self.size, -1]
        share = stored.reshape(sizes).select(self.dimension + 1, self.rank)
        return share.flatten(self.dimension, self.dimension + 1)

    def runs(self, length: int) -> list[tuple[int, int, int]]:
        """Where a rank's ``length`` elements of the dimension are: for each block where its share
        begins in the rank's tensor, where in the whole one, and how long it is."""
        share = length // self.groups
        first = self.rank * share
        return [(n * share, n * share * self.size + first, share) for n in range(self.groups)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a stored tensor goes.

    ``shape`` is the stored tensor's. ``select`` of it has the elements of ``view``, a view of a
    parameter, in the same order; the view may be strided. ``splits`` say the same of a share of a
    tensor that ranks divide. ``dtypes`` are those that the stored tensor may have, in safetensors'
    words.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    select: Callable[[torch.Tensor], torch.Tensor] = _whole
    splits: tuple[Split, ...] = ()
    dtypes: ClassVar[tuple[str, ...]] = ("F64", "F32", "BF16", "F16")

    @property
    def dtype(self) -> torch.dtype:
        """That the values must be finite in."""
        return self.view.dtype

    @property
    def takes_all(self) -> bool:
        """The view has all elements of the stored tensor, in its order."""
        return self.select is _whole

    def may_be_filled_in_place(self) -> bool:
        """Whether :meth:`copy_from` cannot fail, nor make something else of finite values, in a
        model that serves."""
        return True

    def check(self, name: str, stored: torch.Tensor) -> None:
        """Raises CheckpointError if ``stored``, whose elements are finite, stands for values that
        are not."""

    def copy_from(self, stored: torch.Tensor) -> None:
        """Fill the view."""
        with torch.no_grad():
            self.view.copy_(self.select(stored).reshape(self.view.shape))

    def holds_as_stored(self, stored: torch.Tensor) -> bool:
        """Whether the view is the memory of a CPU that has the bytes of ``stored``, in order."""
        view = self.view
        is_plain = type(self) is Target and self.takes_all
        is_same = view.dtype == stored.dtype and view.numel() == stored.numel()
        return is_plain and is_same and view.device.type == "cpu" and view.is_contiguous()

    def equals(self, stored: torch.Tensor) -> bool:
        """Whether ``stored``, in the view's dtype, is what the view holds."""
        return same_values(self.select(stored).to(self.view).reshape(self.view.shape), self.view)


_EXPERTS = ".mlp.experts."
_LAYERS = "decoder.layers."
_FINAL_NORM = "decoder.final_layernorm."
_STAGED = (_LAYERS, _FINAL_NORM, "embedding.", "output_layer.", "mtp.")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among those that share the model's layers, and its experts: each of
    ``expert_ranks`` has some, and each of ``expert_tensor_ranks`` a share of each of these."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_ranks: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_ranks: int = 1

    @classmethod
    def current(cls) -> TensorParallel:
        """The ranks of megatron's parallel state; one process if that is not initialised."""
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            return cls()
        return cls(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )

    def target(
        self,
        name: str,
        view: torch.Tensor,
        shape: list[int],
        groups: int = 1,
        *,
        of_one_expert: bool = False,
    ) -> Target:
        """Target of a tensor of which each rank stores its share in parameter ``name``.

        ``shape`` is that of this rank's share. With ``groups`` > 1 the rows are that many blocks
        of equal size, each of them split by rank (gate and up projection in ``linear_fc1``). With
        ``of_one_expert`` the tensor is of one of the experts that ``name`` has stacked.
        """
        splits = self.splits(name, groups, of_one_expert=of_one_expert)
        if not splits:
            return Target(view, tuple(shape))
        full = list(shape)
        for split in splits:
            full[split.dimension] *= split.size

        def select(stored: torch.Tensor) -> torch.Tensor:
            for split in splits:
                stored = split.share_of(stored)
            return stored

        return Target(view, tuple(full), select, splits)

    def splits(
        self, name: str, groups: int = 1, *, of_one_expert: bool = False
    ) -> tuple[Split, ...]:
        """How the ranks divide parameter ``name``; see :meth:`target`."""
        layer, kind = f".{name}".split(".")[-2:]
        # Transformer Engine's grouped layers number the experts behind the kind.
        dimension = SPLIT_DIMENSION.get(f"{layer}.{kind.rstrip('0123456789')}")
        if _EXPERTS not in name:
            splits = [] if dimension is None else [Split(dimension, groups, self.size, self.rank)]
        else:
            splits = [] if of_one_expert else [Split(0, 1, self.expert_ranks, self.expert_rank)]
            if dimension is not None:
                in_front = 0 if of_one_expert else 1
                ranks, rank = self.expert_tensor_ranks, self.expert_tensor_rank
                splits.append(Split(dimension + in_front, groups, ranks, rank))
        return tuple(split for split in splits if split.size > 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """This process's pipeline stage: ``layers`` layers from ``first`` on.

    ``tied`` says that the last stage has a copy of the embedding for its output layer.
    """

    first: int = 0
    layers: int = 0
    stages: int = 1
    is_first: bool = True
    is_last: bool = True
    tied: bool = False

    @classmethod
    def of(cls, model: Any) -> Stage:
        """The ranks of a model that was built for the parallel state."""
        config = getattr(model, "config", None)
        stages = getattr(config, "pipeline_model_parallel_size", 1)
        if stages == 1:
            return cls()
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        first, layers = get_transformer_layer_offset(config), len(model.decoder.layers)
        tied = model.share_embeddings_and_output_weights
        return cls(first, layers, stages, model.pre_process, model.post_process, tied)

    def local(self, name: str) -> str | None:
        """What the whole model's parameter ``name`` is called here; None if it is elsewhere."""
        if self.stages == 1:
            return name
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            layer = int(number) - self.first
            return f"{_LAYERS}{layer}.{rest}" if 0 <= layer < self.layers else None
        if name == EMBEDDING and self.tied and self.is_last:
            return OUTPUT
        if name.startswith("embedding."):
            return name if self.is_first else None
        if name.startswith(("output_layer.", _FINAL_NORM)):
            return name if self.is_last else None
        return None  # layers of multi-token prediction: stages have none

    def whole(self, name: str) -> str:
        """The inverse of :meth:`local`."""
        if self.stages == 1:
            return name
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            return f"{_LAYERS}{int(number) + self.first}.{rest}"
        return EMBEDDING if name == OUTPUT and self.tied and self.is_last else name

    def is_elsewhere(self, name: str, layers: int) -> bool:
        """Whether the whole model, which has ``layers`` layers, may have ``name`` in other
        stages."""
        if self.stages == 1 or not name.startswith(_STAGED):
            return False
        if name.startswith(_LAYERS):
            number = name.removeprefix(_LAYERS).partition(".")[0]
            if not number.isdigit() or int(number) >= layers:
                return False
        return self.local(name) is None

    def leaves_out(self, name: str) -> bool:
        """Whether the whole model's ``name``, or one of tensors stacked over layers, may be of
        other stages alone."""
        if self.stages == 1:
            return False
        stacked = name.startswith(_LAYERS) and not name.removeprefix(_LAYERS)[:1].isdigit()
        return stacked or self.local(name) is None
