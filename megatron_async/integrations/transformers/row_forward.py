"""A model's forward for one token with the kernels of :mod:`row_kernels`, while it is compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from megatron_async.integrations.transformers.row_kernels import (
    attend_one,
    parts_of,
    parts_of_columns,
    times_columns,
    times_rows,
)

TRIAL = set(os.environ.get("ROW_TRIAL", "").split(","))


class WrittenByAttention(Cache):
    """The layers of a static cache; what a layer is given is written by its attention."""

    def __init__(self, cache: Any) -> None:
        super().__init__(layers=cache.layers)
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        self.pending[layer_idx] = (key_states, value_states)
        return layer.keys, layer.values


class WrittenAtPosition(Cache):
    """The layers of a static cache, written at a position that they share."""

    def __init__(self, cache: Any, position: Tensor) -> None:
        super().__init__(layers=cache.layers)
        self.position = position

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.position, key_states)
        layer.values.index_copy_(2, self.position, value_states)
        return layer.keys, layer.values


def attention_of(cache: WrittenByAttention, position: Tensor) -> Callable[..., Any]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        new = cache.pending.pop(module.layer_idx)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_one(query, *new, key, value, attention_mask, position, scale), None

    return attention


def linear(module: Any, x: Tensor) -> Tensor:
    """``nn.Linear``'s forward."""
    weight, bias = module.weight, module.bias
    if x.numel() != weight.shape[1] or weight.dtype != x.dtype:
        return nn.functional.linear(x, weight, bias)
    return times_rows(x.reshape(-1), weight, bias).reshape(*x.shape[:-1], -1)


def conv(module: Any, x: Tensor) -> Tensor:
    """``Conv1D``'s forward."""
    weight, bias = module.weight, module.bias
    if x.numel() != weight.shape[0] or weight.dtype != x.dtype:
        out = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    elif (parts := parts_of(*weight.shape)) == 1:
        out = times_columns(x.reshape(-1), weight, bias)
    else:
        out = (parts_of_columns(x.reshape(-1), weight, parts).sum(dim=0) + bias).to(x.dtype)
    return out.view(*x.shape[:-1], -1)


def decode_cache(cache: Any, position: Tensor) -> Any:
    if "attention" in TRIAL:
        return WrittenByAttention(cache)
    return WrittenAtPosition(cache, position) if "cache" in TRIAL else cache


@contextmanager
def row_forward(cache: Any, position: Tensor) -> Iterator[None]:
    """Models run in it take the kernels, where they fit."""
    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    products = "products" in TRIAL
    with (
        patch.object(nn.Linear, "forward", linear if products else nn.Linear.forward),
        patch.object(Conv1D, "forward", conv if products else Conv1D.forward),
        patch.dict(
            mapping,
            {"sdpa": attention_of(cache, position)} if "attention" in TRIAL else {},
        ),
    ):
        yield
