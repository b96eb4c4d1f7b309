"""This process's place among the ranks of a model that its user has divided."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_async.errors import ConfigError, shown
from megatron_async.models import parallel
from megatron_async.models.adapt import unwrapped
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks.replica import find_replica, tensor_and_stages


def take_place(model: Any, collection: Any) -> None:
    """Have the networks that are built from now on be those of the ranks that share ``model``.

    All of them call it at the same time, with their shares.

    Args:
        collection: megatron-core's process groups; None takes the model's own, or its parallel
            state.

    Raises:
        ConfigError: the groups cannot be served.
    """
    current = parallel.current()
    if current is not None and not current.is_given:
        return  # a group that was started here, or by a launcher
    model = unwrapped(model)
    if not isinstance(model, torch.nn.Module):
        return  # adapting it says what is wrong
    collection = collection or pg_collection_of(model)
    replica = find_replica(collection)
    if replica is None:
        parallel.set_current(None)
        return
    if current is not None and current.is_of(replica.layout, replica.groups.ranks):
        return
    first = next(model.parameters(), torch.empty(0))
    parallel.set_current(
        ModelParallel(replica.layout, replica.rank, first.device, given=replica.groups)
    )


def pg_collection_of(given: Any) -> Any:
    """The process groups of a context or a model, ours or megatron-core's; None without."""
    return getattr(given, "pg_collection", None)


def engine_class(kind: type, controller: Any) -> type:
    """The class of an engine over a controller's model: ``kind``, or that of a leading or of a
    following rank where the model is divided; then ConfigError for a class of the user's."""
    place = controller.served.network.parallel
    if place is None or not place.is_given or controller.served.group is not None:
        return kind
    name = "leading" if place.rank == 0 else "following"
    module = importlib.import_module(f"megatron_async.megatron_api.spmd.{name}")
    found: type = getattr(module, f"{name.capitalize()}Engine")
    if not issubclass(found, kind):
        raise ConfigError(
            f"{kind.__name__} is a class of its own over a model that is divided over ranks: build "
            "a DynamicInferenceEngine"
        )
    return found


def keywords_of_rank(keywords: dict[str, Any]) -> dict[str, Any]:
    """With the KV heads of this tensor-parallel rank in place of the model's.

    Raises:
        ConfigError: a parallel size is not that of the process groups, or does not divide them.
    """
    tensor, stages = tensor_and_stages(keywords.get("pg_collection"))
    for name, size in (
        ("tensor_model_parallel_size", tensor),
        ("pipeline_model_parallel_size", stages),
    ):
        if keywords.get(name) not in (None, size):
            raise ConfigError(
                f"{name}={shown(keywords[name])}, and this process is one of {size}: initialise "
                "megatron-core with the same sizes"
            )
    heads = keywords.get("num_attention_heads")
    if tensor == 1 or not isinstance(heads, int) or keywords.get("cache_mla_latent"):
        return keywords
    if heads % tensor:
        raise ConfigError(
            f"num_attention_heads={heads} KV heads do not divide by tensor_model_parallel_size="
            f"{tensor}: use a smaller one"
        )
    return keywords | {"num_attention_heads": heads // tensor}
