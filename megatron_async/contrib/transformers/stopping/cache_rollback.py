"""Taking tokens back from a transformers cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

Mark = list[tuple[Tensor, Tensor, int] | None]
"""What must be kept of each layer to return to this point; None: a layer that can be cropped."""

CACHE_NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")


def find_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a model, under any of its names, or None."""
    caches = (model_kwargs.get(name) for name in CACHE_NAMES)
    return next((c for c in caches if c is not None), None)


def decoder_part(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def is_cache(cache: Any) -> bool:
    """Whether it is one of transformers' cache classes. Some models (XLNet) make tuples in the
    prefill, whatever ``use_cache`` says, and others have classes of their own (RWKV)."""
    return isinstance(decoder_part(cache), Cache)


def obstacle_to_rollback(cache: Any, length_limit: int | None) -> str | None:
    """Why tokens cannot be taken back from ``cache``; None where they can.

    ``length_limit``: the most tokens it will ever see.
    """
    if cache is None:
        return None
    part = decoder_part(cache)
    if not is_cache(cache):
        return f"a cache of type {type(part).__name__} cannot be cropped"
    if getattr(part, "offloading", False):
        return "an offloaded cache cannot be cropped"
    kinds = {type(layer) for layer in part.layers}
    lazy = getattr(part, "layer_class_to_replicate", None)
    kinds |= {lazy} if lazy is not None else set()
    for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer}:
        if kind is not StaticSlidingWindowLayer:
            return f"a cache with layers of type {kind.__name__} cannot be cropped"
    for layer in part.layers:
        if type(layer) is StaticSlidingWindowLayer and (
            length_limit is None or length_limit > layer.max_cache_len
        ):
            return (
                f"a static sliding-window cache of {layer.max_cache_len} tokens forgets the oldest "
                f"ones, and generation may reach {length_limit}"
            )
    return None


def layers_of(cache: Any) -> Iterator[Any]:
    if cache is not None and is_cache(cache):
        yield from decoder_part(cache).layers


def mark(cache: Any) -> Mark:
    """A point to return to. Costs no memory but for sliding windows: one window each."""
    return [
        (layer.keys, layer.values, layer.cumulative_length)
        if type(layer) is DynamicSlidingWindowLayer
        else None
        for layer in layers_of(cache)
    ]


def roll_back(cache: Any, point: Mark, tokens: int, next_position: Tensor | None = None) -> None:
    """Return to ``point``, which is ``tokens`` decoded tokens ago. Nothing waits for the device.

    ``next_position``: where the next token goes after that, int64 ``(1,)``, if the caller has it.
    """
    if tokens == 0:
        return
    for layer, kept in zip(layers_of(cache), point, strict=True):
        if kept is not None:
            layer.keys, layer.values, layer.cumulative_length = kept
        elif isinstance(layer, StaticLayer):
            crop_static(layer, tokens, next_position)
        else:
            layer.crop(-tokens)  # a negative number is how many to remove, in 4.57 and in 5


def crop_static(layer: Any, tokens: int, next_position: Tensor | None) -> None:
    """Zero the last ``tokens`` entries of a static layer that has never been full, in place.

    A layer of 4.57 has no count: it takes entries that are not zero for tokens, and those of a
    padding token may be zero. ``next_position`` serves there.
    """
    counted = getattr(layer, "cumulative_length", None)
    if counted is not None:
        length = counted - tokens
    else:
        length = layer.get_seq_length() - tokens if next_position is None else next_position
    cut = torch.arange(layer.keys.shape[-2], device=layer.keys.device) >= length
    layer.keys.masked_fill_(cut[:, None], 0)
    layer.values.masked_fill_(cut[:, None], 0)
    if isinstance(counted, Tensor):
        counted.sub_(tokens)
    elif isinstance(counted, int):
        layer.cumulative_length = counted - tokens
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int -= tokens
