"""A model's forward for one token with the kernels of :mod:`row_kernels`, while it is compiled.

In :meth:`RowForward.swapped` the model's linear layers have forwards of their own, and its
attention has another name, so no other model is touched. What the kernels cannot do shows in one
forward without compilation, :meth:`RowCache.probe`: the step is then compiled as stock has it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from megatron_async.contrib.transformers.captured.row_kernels import (
    attend_one,
    parts_of,
    parts_of_columns,
    runs_on,
    times_columns,
    times_rows,
)

LONGEST = 2048
"""Tokens of a cache: one block of threads reads all keys of a head."""
WIDEST_HEAD = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_numbers = itertools.count()


class NoRowsError(Exception):
    """Why a model's step is compiled as stock has it."""


class RowCache(Cache):
    """The layers of a static cache; what a layer is given is written by its attention.

    Args:
        cache: of one row.
        position: int64 ``(1,)``, of the token.
        allowed: bool ``(1, 1, 1, length)``, the mask that the model is given.
    """

    def __init__(self, cache: Any, position: Tensor, allowed: Tensor) -> None:
        super().__init__(layers=cache.layers)
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._position, self._allowed = position, allowed
        self._attended: list[int] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        self.pending[layer_idx] = (key_states, value_states)
        return layer.keys, layer.values

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Attention in place of transformers' ``sdpa``."""
        if self._attended is not None:
            self._check(module, query, key, value, attention_mask, dropout, more)
        new = self.pending.pop(module.layer_idx)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_one(query, *new, key, value, attention_mask, self._position, scale), None

    def probe(self, forward: Callable[[], Any]) -> None:
        """Run a forward that writes the token at the position, and see what it asks for.

        Raises:
            NoRowsError: something that the kernels do not do.
        """
        self._attended = []
        try:
            forward()
            if sorted(self._attended) != list(range(len(self.layers))) or self.pending:
                raise NoRowsError("not each layer of the cache is attended to once")
        finally:
            self._attended = None
            self.pending.clear()

    def _check(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        more: dict[str, Any],
    ) -> None:
        assert self._attended is not None
        number = getattr(module, "layer_idx", None)
        if number not in self.pending:
            raise NoRowsError("a layer attends to what another one has cached")
        layer, (own_key, own_value) = self.layers[number], self.pending[number]
        if key is not layer.keys or value is not layer.values:
            raise NoRowsError("attention reads something other than the cache")
        if mask is None or mask.data_ptr() != self._allowed.data_ptr():
            raise NoRowsError("a layer has a mask of its own")
        asked = [name for name in ("position_bias", "softcap", "s_aux", "sliding_window")
                 if more.get(name) is not None]  # fmt: skip
        if dropout or asked:
            raise NoRowsError(f"attention has {', '.join(asked) or 'dropout'}")
        heads, dim = query.shape[1], query.shape[-1]
        kv_shape = (1, key.shape[1], 1, dim)
        if own_key.shape != kv_shape or own_value.shape != kv_shape or heads % key.shape[1]:
            raise NoRowsError("keys and values have heads of other sizes")
        tensors = (query, own_key, own_value, key, value)
        if len({t.dtype for t in tensors}) > 1 or query.dtype not in DTYPES or dim > WIDEST_HEAD:
            raise NoRowsError(f"heads of {dim} in {query.dtype} are not covered")
        if any(t.stride(-1) != 1 for t in tensors) or not (
            key.is_contiguous() and value.is_contiguous()
        ):
            raise NoRowsError("keys and values are not contiguous")
        self._attended.append(number)


def why_not(model: Any, cache: Any, batch: int) -> str | None:
    """Why a step has no use for the kernels, as far as it shows without a forward."""
    if batch != 1:
        return "it has several rows"
    if model.config._attn_implementation != "sdpa" or getattr(model.config, "sub_configs", None):
        return "its attention is not sdpa's, or it has several configurations"
    if any(type(layer) is not StaticLayer for layer in cache.layers):
        return "its cache has layers of other kinds"
    if max(layer.max_cache_len for layer in cache.layers) > LONGEST:
        return f"its cache has more than {LONGEST} tokens"
    if not runs_on(model.device):
        return "there is no Triton"
    return None


class RowForward:
    """A model whose layers run with the kernels, where they fit, inside of :meth:`swapped`."""

    def __init__(self, model: Any, cache: RowCache) -> None:
        self._model, self._cache = model, cache
        self._name = f"megatron_async_row_{next(_numbers)}"
        self._forwards = {
            module: functools.partial(linear if type(module) is nn.Linear else conv, module)
            for module in model.modules()
            if is_plain(module)
        }

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """All is as before behind it, wherever an interrupt comes."""
        try:
            ALL_ATTENTION_FUNCTIONS[self._name] = self._cache.attention
            self._model.config._attn_implementation = self._name
            for module, forward in self._forwards.items():
                module.forward = forward
            yield
        finally:
            for module in self._forwards:
                vars(module).pop("forward", None)
            self._model.config._attn_implementation = "sdpa"
            ALL_ATTENTION_FUNCTIONS.pop(self._name, None)


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer that nobody has changed."""
    if type(module) not in (nn.Linear, Conv1D) or "forward" in vars(module):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: Any = module.weight
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in DTYPES:
        return False
    bias: Any = module.bias
    return weight.is_contiguous() and (bias is None or bias.dtype == weight.dtype)


def linear(module: Any, x: Tensor) -> Tensor:
    """``nn.Linear``'s forward."""
    weight, bias = module.weight, module.bias
    if x.numel() != weight.shape[1] or weight.dtype != x.dtype:
        return nn.functional.linear(x, weight, bias)
    out: Tensor = times_rows(x.reshape(-1), weight, bias)
    return out.reshape(*x.shape[:-1], -1)


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
