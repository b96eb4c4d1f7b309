"""Where stored tensors go in the parameters of this tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
"""Megatron's names of the two parameters that may be tied."""

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


@dataclass(frozen=True, slots=True)
class Target:
    """Where a stored tensor goes.

    ``shape`` is the stored tensor's. ``select`` of it has the elements of ``view``, a view of a
    parameter, in the same order; the view may be strided. ``dtypes`` are those that the stored
    tensor may have, in safetensors' words.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    select: Callable[[torch.Tensor], torch.Tensor] = _whole
    dtypes: ClassVar[tuple[str, ...]] = ("F64", "F32", "BF16", "F16")

    def copy_from(self, stored: torch.Tensor) -> None:
        """Fill the view."""
        with torch.no_grad():
            self.view.copy_(self.select(stored).reshape(self.view.shape))

    def equals(self, stored: torch.Tensor) -> bool:
        """Whether ``stored``, in the view's dtype, is what the view holds."""
        return same_values(self.select(stored).to(self.view).reshape(self.view.shape), self.view)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among those that share the model's layers."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> TensorParallel:
        """As megatron's parallel state has it; one process if that is not initialised."""
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            return cls()
        return cls(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )

    def target(self, name: str, view: torch.Tensor, shape: list[int], groups: int = 1) -> Target:
        """Target of a tensor of which each rank stores its share in parameter ``name``.

        ``shape`` is that of this rank's share. With ``groups`` > 1 the rows are that many blocks
        of equal size, each of them split by rank (gate and up projection in ``linear_fc1``).
        """
        dimension = SPLIT_DIMENSION.get(".".join(name.split(".")[-2:]))
        if self.size == 1 or dimension is None:
            return Target(view, tuple(shape))
        full = list(shape)
        full[dimension] *= self.size

        def select(stored: torch.Tensor) -> torch.Tensor:
            sizes = list(stored.shape)
            sizes[dimension : dimension + 1] = [groups, self.size, -1]
            return stored.reshape(sizes).select(dimension + 1, self.rank)

        return Target(view, tuple(full), select)
