"""New weights for a model that is being served.

``source``: where they are, also in several messages. ``place``: they are read, checked as a whole
and copied into the parameters, by ``targets``, where each tensor goes. ``swap``: all engines over
the model get them between two of their steps. A trainer's process sends them by memory
(``shared_memory``) or by a collective (``group``, ``nccl_group`` and ``announced``; ``transfer``
gathers an update), over ``tensor_info``, what is said before; ``broadcast`` hands whole tensors to
ranks that have shares, and ``parallel_layouts`` joins and makes shards. ``sharded``: each rank
takes its own share of the tensors of a trainer's ranks.

``DynamicInferenceEngine.update_weights`` is what people call; the names below are theirs too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "GatheredWeights": "source",
    "ShardGroup": "sharded.group",
    "ShardedWeights": "sharded.shared",
    "SharedWeights": "shared_memory",
    "TrainerLayout": "sharded.layout",
    "WeightGroup": "group",
    "WeightSource": "source",
    "join_shards": "parallel_layouts",
    "open_sharded": "sharded.source",
    "open_weights": "shared_memory",
    "relay": "parallel_layouts",
    "shard_of": "parallel_layouts",
}
"""Where each name lives; ``__init__.pyi`` has the same for type checkers."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
