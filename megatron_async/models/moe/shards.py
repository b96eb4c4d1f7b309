"""Experts in checkpoints of ``dist_checkpointing``, as megatron-core lays them out.

All of ``SequentialMLP``, ``GroupedMLP`` and ``TEGroupedMLP`` store a layer's experts under the same
names: stacked over experts in one tensor, or each expert by itself with gate and up projection
apart (``singleton_local_shards``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.checkpoint.targets import SPLIT_DIMENSION

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
        shards = _of_each if single else _of_all
        for part in shards(name, parameter, experts.gated, len(offsets)):
            found[f"{prefix}{part.key}{part.mark}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{part.key}", part.data, *offsets, *part.splits,
                prepend_axis_num=len(offsets), replica_id=part.replica,
            )  # fmt: skip
    return found


class _Part(NamedTuple):
    """What this rank stores under ``key``: place, and number of places, in each dimension that is
    split. ``mark`` tells those of one key apart; ``replica`` numbers ranks that have the same."""

    key: str
    data: Tensor
    splits: tuple[tuple[int, int, int], ...]
    mark: str = ""
    replica: int = 0


def _of_all(name: str, parameter: Tensor, gated: bool, axis: int) -> Iterator[_Part]:
    """Experts stacked, behind ``axis`` other dimensions."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    by_expert: tuple[tuple[int, int, int], ...] = ()
    if ranks > 1:
        by_expert = ((axis, parallel_state.get_expert_model_parallel_rank(), ranks),)
    dimension = SPLIT_DIMENSION.get(name)
    rank, size = _among_sharers()
    if size == 1 or dimension is None:
        yield _Part(name, parameter, by_expert, replica=rank)
        return
    halves = 2 if gated and name.startswith("linear_fc1.") else 1
    for half, data in enumerate(parameter.detach().chunk(halves, 1 + dimension)):
        place = (axis + 1 + dimension, half * size + rank, halves * size)
        yield _Part(name, data, (*by_expert, place), mark=f".{half}")


def _of_each(name: str, parameter: Tensor, gated: bool, axis: int) -> Iterator[_Part]:
    """Expert by expert; the data of parameters stay as they are."""
    first = len(parameter) * parallel_state.get_expert_model_parallel_rank()
    dimension = SPLIT_DIMENSION.get(name)
    rank, size = _among_sharers()
    split = ((axis + dimension, rank, size),) if size > 1 and dimension is not None else ()
    replica = 0 if split else rank
    for number, expert in enumerate(parameter.detach(), start=first):
        key = f"{number}.{name}"
        if gated and name.startswith("linear_fc1."):
            gate, up = expert.chunk(2)
            yield _Part(f"{key}_w", gate, split, replica=replica)
            yield _Part(f"{key}_v", up, split, replica=replica)
        else:
            yield _Part(key, expert, split, replica=replica)


def _among_sharers() -> tuple[int, int]:
    """This rank's place among those that share each expert, and their number."""
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
