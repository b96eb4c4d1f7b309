"""Layers of a model that launch the same kernels: few of them show what all compile.

Layers are alike whose modules, settings and tensors differ in nothing but their numbers. What a
layer launches may also depend on the one in front of it and on the one behind it, so a layer stands
for another one between such neighbours alone.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList

_OF_ONE_LAYER = frozenset(
    ("layer_number", "layer_index", "cache_layer", "state_layer", "submodules_config", "cp")
)
"""Attributes that say which layer it is, what its modules were built from, and how megatron's mixer
is divided in training."""
_LEFT_OUT = _OF_ONE_LAYER | vars(Module()).keys()
_PLAIN = frozenset((bool, int, float, str, type(None)))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def shortened(model: Any, kinds: Sequence[Hashable]) -> Any:
    """``model`` with the fewest of its decoder's layers that :func:`enough_of` knows. It shares
    them, and leaves the whole model as it is: another engine may run that meanwhile.

    Args:
        kinds: of its layers, see :func:`kinds_of`.
    """
    layers = [copy.copy(model.decoder.layers[number]) for number in enough_of(kinds)]
    for layer, behind in itertools.pairwise(layers):
        if hasattr(layer, "attach"):
            layer.attach(behind.first_norm)
    return _with(model, decoder=_with(model.decoder, layers=ModuleList(layers)))


def _with(module: Any, **children: Module) -> Any:
    """A module with other children of these names."""
    copied = copy.copy(module)
    vars(copied)["_modules"] = {**vars(module)["_modules"], **children}
    return copied


def enough_of(kinds: Sequence[Hashable]) -> list[int]:
    """Ascending places in a sequence, its ends among them, that keep its neighbourhoods: each kind
    stands between the same two kinds as in the whole, and between no others."""
    ends = (object(), *kinds, object())
    around = list(zip(ends, ends[1:], ends[2:], strict=False))
    places: list[int] = []
    seen: set[tuple[Hashable, ...]] = set()
    at = 0
    while at < len(kinds):
        places.append(at)
        seen.add(around[at])
        at = _next_of(at, around, seen)
    return places


def _next_of(
    at: int, around: Sequence[tuple[Hashable, ...]], seen: set[tuple[Hashable, ...]]
) -> int:
    """The last place that may follow ``at``, with nothing unseen left out."""
    following = skipped = at + 1
    while skipped < len(around) - 1 and around[skipped] in seen:
        skipped += 1
        if around[skipped][:2] == around[at][1:]:
            following = skipped
    return following


def kinds_of(model: Any) -> list[int]:
    """What the layers of a model's decoder are: equal numbers for those that are alike."""
    kinds = _Kinds()
    return [kinds.of_module(layer, ()) for layer in model.decoder.layers]


class _Kinds:
    """Numbers of what was met, equal for what launches the same. What is not known to be alike has
    numbers of its own."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._configs: list[Any] = []

    def of_module(self, module: Module, inside: tuple[int, ...]) -> int:
        """``inside`` are the ids of the modules that this one is in."""
        inside = *inside, id(module)
        own = vars(module)
        watched = id(module) if any(own[hooks] for hooks in _HOOKS) else None
        settings = {name: own[name] for name in own if name not in _LEFT_OUT}
        parts = (settings, own["_parameters"], own["_buffers"], own["_modules"])
        kind = (type(module), module.training, watched, *(self._of(part, inside) for part in parts))
        return self._numbers.setdefault(kind, len(self._numbers))

    def _of(self, value: Any, inside: tuple[int, ...]) -> Hashable:
        if type(value) in _PLAIN:
            return type(value), value
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, Module):
            return None if id(value) in inside else self.of_module(value, inside)
        if isinstance(value, list | tuple):
            return type(value), tuple(self._of(each, inside) for each in value)
        if isinstance(value, dict):
            return dict, tuple((name, self._of(each, inside)) for name, each in value.items())
        if dataclasses.is_dataclass(value) and type(value).__hash__ is None:
            return type(value), self._of_config(value)
        try:
            hash(value)
        except TypeError:
            return type(value), id(value)
        return type(value), value

    def _of_config(self, config: Any) -> int:
        """Its place among those that differ: some layers have a copy of their own."""
        for place, other in enumerate(self._configs):
            if other is config or (type(other) is type(config) and other == config):
                return place
        self._configs.append(config)
        return len(self._configs) - 1


def _of_tensor(tensor: Tensor) -> Hashable:
    """What kernels may be compiled for, and how they are chosen."""
    aligned = tensor.data_ptr() % 16 == 0
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), aligned
