"""New weights for a model that is being served.

``source``: where they are. ``place``: they are read, checked as a whole and copied into the
parameters, by ``targets``, where each tensor goes. ``swap``: all engines over the model get them
between two of their steps. A trainer's process sends them by memory (``shared_memory``) or by a
collective (``group``, ``nccl_group`` and ``announced``; ``transfer`` gathers an update), over
``tensor_info``, what is said before; ``broadcast`` hands whole tensors to ranks that have shares,
and ``parallel_layouts`` joins and makes shards.

``DynamicInferenceEngine.update_weights`` is what people call; the names below are theirs too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.weights.group import WeightGroup
    from megatron_async.weights.parallel_layouts import join_shards, relay, shard_of
    from megatron_async.weights.shared_memory import SharedWeights, open_weights
    from megatron_async.weights.source import WeightSource

_HOMES = {
    "SharedWeights": "shared_memory",
    "WeightGroup": "group",
    "WeightSource": "source",
    "join_shards": "parallel_layouts",
    "open_weights": "shared_memory",
    "relay": "parallel_layouts",
    "shard_of": "parallel_layouts",
}

__all__ = [
    "SharedWeights",
    "WeightGroup",
    "WeightSource",
    "join_shards",
    "open_weights",
    "relay",
    "shard_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
