"""The names of ``HOMES`` for type checkers; ``tests/unit/test_public_names.py`` compares."""

from megatron_async.weights.group import WeightGroup as WeightGroup
from megatron_async.weights.parallel_layouts import join_shards as join_shards
from megatron_async.weights.parallel_layouts import relay as relay
from megatron_async.weights.parallel_layouts import shard_of as shard_of
from megatron_async.weights.sharded.group import ShardGroup as ShardGroup
from megatron_async.weights.sharded.layout import TrainerLayout as TrainerLayout
from megatron_async.weights.sharded.shared import ShardedWeights as ShardedWeights
from megatron_async.weights.sharded.source import open_sharded as open_sharded
from megatron_async.weights.shared_memory import SharedWeights as SharedWeights
from megatron_async.weights.shared_memory import open_weights as open_weights
from megatron_async.weights.source import GatheredWeights as GatheredWeights
from megatron_async.weights.source import WeightSource as WeightSource

HOMES: dict[str, str]
__all__: list[str]
