"""All tensors that an engine's objects have now, each by its way from them.

Nobody has to register a tensor, and nobody can forget to: attributes and containers are followed.
What they mean a class may say in sets of attributes' names:

- ``of_one_forward``: each forward replaces them, and no graph may rely on them.
- ``scratch``: of an object of a model, memory that kernels write before they read it.

Under an attribute ``outgrown`` stands what an engine that came later has replaced, and earlier
graphs go on with.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.device.releasable import Region

OUTGROWN = "outgrown"
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType)
_SEQUENCES = (list, tuple, deque, set, frozenset)
_TABLES = ("_parameters", "_buffers", "_modules")
"""The entries of these tables of a module are attributes of it."""
_MODELS = "megatron_async.models."
_NOT_FOLLOWED = frozenset(sys.stdlib_module_names) | {"numpy", "msgspec", "zmq"}


class _Part(NamedTuple):
    """A value by its name; ``is_made`` of tensors in it that an object of a model has made."""

    name: str
    value: object
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """What was found.

    Attributes:
        tensors: by name, such as ``model.embedding.word_embeddings.weight``.
        made: names of those that objects of models keep beside parameters and buffers.
        keepers: objects with ``derived_tensors``, by name.
        regions: memory that can be given back, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    keepers: dict[str, Any] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    @classmethod
    def of(cls, roots: Mapping[str, object]) -> LiveTensors:
        """Follow all that ``roots`` refer to, one after the other: what several have is named by
        the way from the first of them, the shortest one."""
        found = cls()
        seen: dict[int, object] = {}  # kept, so that no other object gets its id
        for root in roots.items():
            found.follow(_Part(*root), seen)
        return found

    def follow(self, root: _Part, seen: dict[int, object]) -> None:
        """Add what ``root`` refers to and was not ``seen`` before."""
        waiting = deque([root])
        while waiting:
            part = waiting.popleft()
            name, value = part.name, part.value
            if isinstance(value, Tensor):
                self.tensors[name] = value
                if part.is_made:
                    self.made.add(name)
                continue
            if id(value) in seen or not _is_followed(value):
                continue
            seen[id(value)] = value
            if isinstance(value, Region):
                self.regions[name] = value
            elif hasattr(value, "derived_tensors"):
                self.keepers[name] = value
            waiting.extend(_parts(part))


def _is_followed(value: object) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, (dict, functools.partial, types.MethodType, types.FunctionType)):
        return True
    if isinstance(value, _SEQUENCES) and not hasattr(value, "_fields"):
        # Tokens, names and sizes.
        return bool(value) and not isinstance(next(iter(value)), (int, float, str, bytes))
    return type(value).__module__.partition(".")[0] not in _NOT_FOLLOWED


def _parts(of: _Part) -> Iterator[_Part]:
    """What a value refers to."""
    name, value = of.name, of.value
    inside = _inside(name, value)
    if inside is None:
        yield from _attributes(name, value)
        return
    for key, part in inside:
        yield _Part(key, part, of.is_made)


def _inside(name: str, value: Any) -> Iterable[tuple[str, object]] | None:
    """What a container or a function holds, by name; None for other objects."""
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", part) for key, part in list(value.items())]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip((f"{name}.{of}" for of in value._fields), value, strict=True)
    if isinstance(value, _SEQUENCES):
        return [(f"{name}[{number}]", part) for number, part in enumerate(list(value))]
    if isinstance(value, functools.partial):
        return [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [(name, value.__self__)]
    if isinstance(value, types.FunctionType):
        return [(name, cell) for cell in _closed_over(value)]
    return None


def _closed_over(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not there yet
            continue


def _attributes(name: str, value: Any) -> Iterator[_Part]:
    kind = type(value)
    passing: Collection[str] = getattr(kind, "of_one_forward", ())
    is_module, is_ours = isinstance(value, torch.nn.Module), kind.__module__.startswith(_MODELS)
    scratch: Collection[str] = getattr(kind, "scratch", ())
    attributes = getattr(value, "__dict__", {})
    stored_nowhere = attributes.get("_non_persistent_buffers_set", ()) if is_module else ()
    for key, part in list(attributes.items()):
        if is_module and key in _TABLES:
            for each, entry in list(part.items()):
                yield _Part(f"{name}.{each}", entry, is_ours and each in stored_nowhere)
        elif key not in passing:
            yield _Part(f"{name}.{key}", part, is_ours and key not in scratch)
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in passing and hasattr(value, key):
                yield _Part(f"{name}.{key}", getattr(value, key), is_ours and key not in scratch)
