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
        window_growth: by how many elements the first dimension of ``shape`` is longer for each
            further token of a window. A layer with such a tensor *replays*: it keeps what its last
            tokens gave, leaves in entry 0 the state after a window's first token, and takes the
            accepted drafts in again with the next window. So it has one entry, whatever the window.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sum: bool = False
    window_growth: int = 0

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

    @property
    def replays(self) -> bool:
        """Whether one entry does for windows, see :class:`StateTensor`."""
        return any(tensor.window_growth for tensor in self.tensors)

    def for_window(self, window: int) -> RecurrentStateSpec:
        """The same with room for windows of up to ``window`` tokens."""
        tensors = tuple(
            each._replace(
                shape=(each.shape[0] + (window - 1) * each.window_growth, *each.shape[1:]),
                window_growth=0,
            )
            if each.window_growth
            else each
            for each in self.tensors
        )
        return replace(self, tensors=tensors)

    def with_dtype(self, name: str | None) -> RecurrentStateSpec:
        """The same with its sums kept in a dtype of torch's; None leaves them as they are."""
        if name is None:
            return self
        dtype = getattr(torch, name)
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
