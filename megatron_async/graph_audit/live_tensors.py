"""All tensors that an engine's objects have now, each by its way from them.

Nobody has to register a tensor, and nobody can forget to: attributes and containers are followed. A
class whose attributes are replaced by each forward names them in ``of_one_forward``; no graph may
rely on these. Under an attribute ``outgrown`` stands what an engine that came later has replaced,
and earlier graphs go on with.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_async.device.releasable import Region

OUTGROWN = "outgrown"
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType)
_SEQUENCES = (list, tuple, deque, set, frozenset)
_CLEAR = ("_parameters", "_buffers", "_modules")
"""Tables of a module, whose entries are attributes of it."""
_NOT_FOLLOWED = frozenset(sys.stdlib_module_names) | {"numpy", "msgspec", "zmq"}


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """What was found.

    Attributes:
        tensors: by name, such as ``network.model.embedding.word_embeddings.weight``.
        keepers: objects with ``derived_tensors``, by name.
        regions: memory that can be given back, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    keepers: dict[str, Any] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    @classmethod
    def of(cls, roots: Mapping[str, object]) -> LiveTensors:
        """Follow all that ``roots`` refer to; names begin with theirs."""
        found = cls()
        waiting = deque(roots.items())
        seen: dict[int, object] = {}  # kept, so that no other object gets its id
        while waiting:
            name, value = waiting.popleft()
            if isinstance(value, Tensor):
                found.tensors[name] = value
                continue
            if id(value) in seen or not _is_followed(value):
                continue
            seen[id(value)] = value
            if isinstance(value, Region):
                found.regions[name] = value
            elif hasattr(value, "derived_tensors"):
                found.keepers[name] = value
            waiting.extend(_parts(name, value))
        return found


def _is_followed(value: object) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, (dict, functools.partial, types.MethodType, types.FunctionType)):
        return True
    if isinstance(value, _SEQUENCES):
        # Tokens, names and sizes.
        return bool(value) and not isinstance(next(iter(value)), (int, float, str, bytes))
    return type(value).__module__.partition(".")[0] not in _NOT_FOLLOWED


def _parts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """What ``value`` refers to, by name."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip((f"{name}.{of}" for of in value._fields), value, strict=True)
    elif isinstance(value, _SEQUENCES):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield name, value.__self__
    elif isinstance(value, types.FunctionType):
        yield from ((name, cell) for cell in _closed_over(value))
    else:
        yield from _attributes(name, value)


def _closed_over(function: types.FunctionType) -> Iterable[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not there yet
            continue


def _attributes(name: str, value: Any) -> Iterator[tuple[str, object]]:
    passing = getattr(type(value), "of_one_forward", ())
    is_module = isinstance(value, torch.nn.Module)
    for key, part in list(getattr(value, "__dict__", {}).items()):
        if is_module and key in _CLEAR:
            yield from ((f"{name}.{of}", each) for of, each in list(part.items()))
        elif key not in passing:
            yield f"{name}.{key}", part
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in passing and hasattr(value, key):
                yield f"{name}.{key}", getattr(value, key)
