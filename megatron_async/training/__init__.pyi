"""The names of ``HOMES`` for type checkers; ``tests/unit/test_public_names.py`` compares."""

from megatron_async.training.exact import ExactNumerics as ExactNumerics
from megatron_async.training.exact import exact_numerics as exact_numerics
from megatron_async.training.log_probs import exact_log_probs as exact_log_probs
from megatron_async.training.routing_replay import ForcedRouting as ForcedRouting
from megatron_async.training.routing_replay import forced_routing as forced_routing

HOMES: dict[str, str]
__all__: list[str]
