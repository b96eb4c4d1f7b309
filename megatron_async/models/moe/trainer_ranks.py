"""Ranks that share each expert outside of an engine: those of a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.kernels.moe.reference import Routing
from megatron_async.models import parallel

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


class TrainerRanks:
    """What a layer of experts asks of the ranks that share it, by megatron-core's groups, with
    gradients."""

    @property
    def expert_rank(self) -> int:
        """Each has all experts.

        Raises:
            ConfigError: each has some of them, for tokens of its own.
        """
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            raise ConfigError(
                "experts are spread over ranks that have tokens of their own, which only "
                "megatron-core's layers exchange: train without expert_model_parallel_size"
            )
        return 0

    @property
    def expert_tensor_rank(self) -> int:
        """This rank's place among those that have a share of each expert."""
        rank: int = torch.distributed.get_rank(self._group)
        return rank

    @property
    def _group(self) -> Any:
        return parallel_state.get_expert_tensor_parallel_group()

    def sum_experts_(self, x: Tensor) -> Tensor:
        """Add up what ranks have of each token."""
        total: Tensor = reduce_from_tensor_model_parallel_region(x, self._group)
        return total

    def shared(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """What all ranks have alike, with gradients that are the sums of theirs."""
        group = self._group
        copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group)
        weights = copy_to_tensor_model_parallel_region(routing.weights, group)
        return copied, routing._replace(weights=weights)


class _OfAnotherRank(torch.autograd.Function):
    """Zeros, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def added_by_another(bias: Tensor | None) -> Tensor | None:
    """A bias that another rank adds, of which this one has a copy: None, but with gradients zeros,
    since all copies need the same gradient."""
    if bias is None or not torch.is_grad_enabled():
        return None
    zeros: Tensor = _OfAnotherRank.apply(bias)  # type: ignore[no-untyped-call]
    return zeros


def ranks_of(config: Any) -> Any:
    """The ranks that share the experts of a layer of megatron's ``config``: a
    :class:`~megatron_async.models.parallel.ModelParallel` or :class:`TrainerRanks`; None for one.
    """
    if config.expert_model_parallel_size * config.expert_tensor_parallel_size == 1:
        return None
    place = parallel.current()
    return TrainerRanks() if place is None else place


def with_gradients(ranks: Any) -> Any:
    """The same ranks for a forward with gradients, which those of an engine do not have."""
    if isinstance(ranks, parallel.ModelParallel) and ranks.layout.expert == 1:
        return TrainerRanks()
    return ranks
