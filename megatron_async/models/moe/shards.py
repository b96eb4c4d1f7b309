"""Experts in checkpoints of ``dist_checkpointing``, as megatron-core lays them out.

All of ``SequentialMLP``, ``GroupedMLP`` and ``TEGroupedMLP`` store a layer's experts under the same
names: stacked over experts in one tensor, or each expert by itself with gate and up projection
apart (``singleton_local_shards``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)

from megatron.core import parallel_state  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip


def expert_shards(
    experts: Any, prefix: str, offsets: Any = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The sharded state dict of stacked experts, whose data are views of the parameters.

    Args:
        experts: their module; the first dimension of each parameter is the expert.
        prefix: of the state dict.
        offsets: of this layer among stacked ones.
        metadata: megatron's; ``singleton_local_shards`` is read.
    """
    single = (metadata or {}).get("singleton_local_shards", False)
    found: dict[str, Any] = {}
    for name, parameter in experts.named_parameters():
        parts = _single(name, parameter, experts.gated) if single else [(name, parameter)]
        for key, part in parts:
            split = () if single else _by_rank(len(offsets))
            found[f"{prefix}{key}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{key}", part, *offsets, *split, prepend_axis_num=len(offsets)
            )
    return found


def _by_rank(axis: int) -> tuple[tuple[int, int, int], ...]:
    """Where this rank's experts are among all, in the first dimension behind ``axis`` others."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    if ranks == 1:
        return ()
    return ((axis, parallel_state.get_expert_model_parallel_rank(), ranks),)


def _single(name: str, parameter: Tensor, gated: bool) -> Iterator[tuple[str, Tensor]]:
    """A parameter expert by expert; the data of parameters stay as they are."""
    first = len(parameter) * parallel_state.get_expert_model_parallel_rank()
    for number, expert in enumerate(parameter.detach(), start=first):
        key = f"{number}.{name}"
        if gated and name.startswith("linear_fc1."):
            gate, up = expert.chunk(2)
            yield f"{key}_w", gate
            yield f"{key}_v", up
        else:
            yield key, expert
