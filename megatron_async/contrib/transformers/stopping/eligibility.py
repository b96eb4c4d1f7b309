"""When stock ``generate`` has to be used."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_async.contrib.transformers.stopping.cache_rollback import (
    find_cache,
    obstacle_to_rollback,
)
from megatron_async.contrib.transformers.stopping.criteria import AsyncStoppingCriteriaList
from megatron_async.contrib.transformers.stopping.model_calls import (
    attention_kind,
    is_own_cache_of_generate,
    takes_cache_position,
)


def must_keep_cache(
    model: Any, criteria: AsyncStoppingCriteriaList, config: Any, model_kwargs: dict[str, Any]
) -> bool:
    """Whether the cache has to be that of stock after tokens were undone: somebody gets it, or
    decoding may go on from there."""
    if config.return_dict_in_generate or criteria.host_marked:
        return True
    cache = find_cache(model_kwargs)
    return cache is not None and not is_own_cache_of_generate(model, cache)


def obstacle(
    criteria: AsyncStoppingCriteriaList,
    processors: Any,
    config: Any,
    model_kwargs: dict[str, Any],
    *,
    keeps_cache: bool,
    synced_gpus: bool,
    device: torch.device,
) -> str | None:
    """Why stopping cannot be asynchronous in this call; None where it can."""
    if criteria.streams is None:
        return f"stop checks on {device.type} tensors cannot be deferred"
    if synced_gpus:
        return "synced_gpus makes all ranks agree on each token"
    if getattr(config, "is_assistant", False):
        return "the model is the assistant of another"
    if criteria.host_marked and any(
        type(p).__name__ == "UnbatchedClassifierFreeGuidanceLogitsProcessor" for p in processors
    ):
        return "guidance_scale keeps a cache of its own, which cannot be cropped"
    if not keeps_cache:
        return None
    cache = find_cache(model_kwargs)
    if cache is None and model_kwargs.get("use_cache"):
        return "the model makes its own cache, which cannot be cropped"
    limit = criteria.length_limit
    if limit is None or model_kwargs.get("inputs_embeds") is not None:
        return obstacle_to_rollback(cache, None)
    return obstacle_to_rollback(cache, limit - 1)  # the last token is not computed


WARPERS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
)
"""Logits processors that look at the scores alone."""


TAKEN = (
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "return_dict",
    "use_cache",
)
"""Keyword arguments of forwards that a captured step has a place for."""


def obstacle_in_arguments(model: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why forwards cannot be given ``model_kwargs`` in a captured step; None where they can."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    if getattr(model.config, "alibi", False):
        return "ALiBi makes its biases from a mask of two dimensions"
    if mask is not None and mask.ndim != 2:
        return "the attention mask has other dimensions than two"
    if positions is not None and (positions.ndim != 2 or takes_cache_position(model)):
        return "the position_ids are the caller's"
    for name, value in model_kwargs.items():
        if value is not None and name not in (*TAKEN, "position_ids"):
            return f"forwards are given {name}"
    return None


def obstacle_to_capture(
    model: Any,
    criteria: AsyncStoppingCriteriaList,
    processors: Any,
    config: Any,
    call: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why decoding cannot be one captured graph; None where it can."""
    cache, limit = find_cache(model_kwargs), criteria.length_limit
    if criteria.streams is None:
        return "the tensors are on the CPU"
    if call.get("synced_gpus"):
        return "synced_gpus makes all ranks agree on each token"
    if config.return_dict_in_generate:
        return "return_dict_in_generate asks for more than ids"
    if limit is None:
        return "there is no limit on the length"
    if model.config.is_encoder_decoder or model_kwargs.get("inputs_embeds") is not None:
        return "only decoders that are given ids are captured"
    if type(cache).__name__ != "StaticCache" or not is_own_cache_of_generate(model, cache):
        return 'it needs cache_implementation="static", and no cache of the caller\'s'
    if {type(layer).__name__ for layer in cache.layers} != {"StaticLayer"}:
        return "the static cache has layers other than of full attention"
    if any(module.training for module in model.modules()):
        return "the model is in training mode"
    if (reason := obstacle_in_arguments(model, model_kwargs)) is not None:
        return reason
    if attention_kind(model) not in ("sdpa", "eager"):
        return f"attention {attention_kind(model)!r} takes no mask of four dimensions"
    for processor in processors:
        if type(processor).__name__ not in WARPERS:
            return f"{type(processor).__name__} looks at ids"
    for criterion in (*criteria.on_device, *criteria.host_marked):
        if type(criterion).__name__ != "EosTokenCriteria":
            return f"{type(criterion).__name__} is not an end token, a length or a time"
    return None
