"""The ranks that share a model which its user has divided with megatron-core, found from process
groups. Each data-parallel replica has ranks of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_async.errors import ConfigError
from megatron_async.models.parallel import GivenGroups
from megatron_async.ranks.layout import Layout


class Replica(NamedTuple):
    """The ranks of one model.

    Args:
        rank: this process's, in ``layout``.
    """

    layout: Layout
    rank: int
    groups: GivenGroups


def find_replica(collection: Any = None) -> Replica | None:
    """The ranks that share this process's model; None where it has the whole.

    Args:
        collection: megatron-core's ``ProcessGroupCollection``; None takes its parallel state.

    Raises:
        ConfigError: the groups are not those of tensor, expert and pipeline parallelism, the
            tensor-parallel rank first and the stage last.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    tensor, pipeline, expert = _groups(collection)
    layout = Layout(_size(tensor), _size(pipeline), _size(expert))
    if layout.world_size == 1:
        return None
    own = dist.get_rank()
    stage = _ranks(expert if layout.expert > 1 else tensor, own)
    stages = _ranks(pipeline, own)
    place, stride = stages.index(own), stages[1] - stages[0] if len(stages) > 1 else 0
    ranks = tuple(r + (n - place) * stride for n in range(len(stages)) for r in sorted(stage))
    rank = ranks.index(own)
    is_regular = stages == [stages[0] + n * stride for n in range(len(stages))]
    if not is_regular or rank % layout.tensor != _ranks(tensor, own).index(own):
        raise ConfigError(
            f"{layout}: the process groups of rank {own} do not count the tensor-parallel rank "
            "first and the pipeline stage last; initialise megatron-core with its own order"
        )
    return Replica(layout, rank, GivenGroups(ranks, tensor, pipeline, expert))


def tensor_and_stages(collection: Any = None) -> tuple[int, int]:
    """The sizes of tensor and pipeline parallelism; 1 where nobody has set any."""
    tensor, pipeline, _ = _groups(collection)
    return _size(tensor), _size(pipeline)


def several(collection: Any = None) -> tuple[Any, Any]:
    """The groups of pipeline and expert parallelism, each None where it has one rank."""
    _, pipeline, expert = _groups(collection)
    return tuple(None if _size(group) == 1 else group for group in (pipeline, expert))  # type: ignore[return-value]


def data_parallel_group() -> Any:
    """megatron-core's; None where its parallel state is not initialised."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_data_parallel_group()


def data_parallel_rank() -> int:
    """This process's replica, from 0."""
    group = data_parallel_group()
    return 0 if group is None else dist.get_rank(group)


def _groups(collection: Any) -> tuple[Any, Any, Any]:
    """The groups of tensor, pipeline and expert parallelism; None where there is none."""
    if collection is not None:
        tensor, pipeline, expert = (getattr(collection, x, None) for x in ("tp", "pp", "ep"))
        return tensor, pipeline, expert
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None, None, None
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
    )


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _ranks(group: Any, own: int) -> list[int]:
    return [own] if group is None else list(dist.get_process_group_ranks(group))
