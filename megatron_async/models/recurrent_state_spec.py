"""What a model's recurrent layers keep of a request, instead of keys and values of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_async.errors import ConfigError


class StateTensor(NamedTuple):
    """One tensor of a layer's state of one request.

    Args:
        name: by which the layer finds it, such as ``"conv"`` and ``"ssm"``.
        shape: of one request in one layer, this tensor-parallel rank's share.
        dtype: in which it is kept.
        is_sum: it sums over all tokens, so that ``recurrent_state_dtype`` is about it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sum: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of one request in one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """State of one request in this rank's recurrent layers, which are alike in it.

    Recurrent layer ``i`` counts from 0 among the recurrent layers, in the order of the forward.
    """

    num_layers: int
    tensors: tuple[StateTensor, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one request, all layers together."""
        return self.num_layers * sum(tensor.state_bytes for tensor in self.tensors)

    def with_dtype(self, dtype: torch.dtype | None) -> RecurrentStateSpec:
        """The same with its sums kept in ``dtype``; None leaves them as they are."""
        if dtype is None:
            return self
        tensors = (each._replace(dtype=dtype) if each.is_sum else each for each in self.tensors)
        return replace(self, tensors=tuple(tensors))


def recurrent_state_spec(model: torch.nn.Module) -> RecurrentStateSpec | None:
    """The state that all recurrent layers of ``model`` keep; None if it has none.

    A recurrent layer is a module with ``state_tensors``, a tuple of :class:`StateTensor`. Its
    ``state_layer`` becomes its number among them, in the order of ``model.modules()``.

    Raises:
        ConfigError: two of them differ in what they keep.
    """
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "state_tensors")]
    kinds = list(dict.fromkeys(tuple(each.state_tensors) for each in layers))
    if len(kinds) > 1:
        raise ConfigError(
            f"the model's recurrent layers differ in their state: {kinds[0]} and {kinds[1]}; one "
            "pool serves layers that are alike in this"
        )
    for number, layer in enumerate(layers):
        layer.state_layer = number
    return RecurrentStateSpec(len(layers), kinds[0]) if kinds else None
