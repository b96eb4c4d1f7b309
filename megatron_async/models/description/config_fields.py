"""Checks of a configuration's fields by their types."""

from __future__ import annotations

import sys
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_async.config.engine_config import MAX_COUNT
from megatron_async.errors import CheckpointError, shown

MOST_ELEMENTS = 2**16
"""No list of a configuration is longer."""


def _wanted(kind: Any, value: Any, least: int) -> str | None:
    """What a field of type ``kind`` must be, where ``value`` is not that."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (inner for inner in get_args(kind) if inner is not NoneType)
        wanted = None if value is None else _wanted(kind, value, least)
        return wanted and f"{wanted} or None"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        # An integer of hundreds of digits is no float either.
        good, wanted = is_number and 0 < value <= sys.float_info.max, "a finite number above 0"
    elif kind is int:
        good = is_number and isinstance(value, int) and least <= value <= MAX_COUNT
        wanted = f"a {'positive' if least else 'non-negative'} integer of at most {MAX_COUNT}"
    elif kind is bool:
        good, wanted = isinstance(value, bool), "true or false"
    elif get_origin(kind) is Literal:
        known = isinstance(value, str) and value in get_args(kind)
        good, wanted = known, f"one of {', '.join(get_args(kind))}"
    elif get_origin(kind) is tuple:
        element = get_args(kind)[0]
        is_list = isinstance(value, tuple) and len(value) <= MOST_ELEMENTS
        good = is_list and all(_wanted(element, x, least=0) is None for x in value)
        wanted = f"a list of at most {MOST_ELEMENTS}, each {_wanted(element, None, least=0)}"
    else:
        good, wanted = isinstance(value, kind), f"a {kind.__name__}"
    return None if good else wanted


def check_fields(config: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Check each field by its type. Integers in float fields become floats, lists become tuples:
    JSON does not tell them apart.

    Raises:
        CheckpointError: a value is of another type, or out of range.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, list) and tuple in [get_origin(k) for k in (kind, *get_args(kind))]:
            value = tuple(value)
            object.__setattr__(config, name, value)
        wanted = _wanted(kind, value, least=0 if name in may_be_zero else 1)
        if wanted is not None:
            raise CheckpointError(f"model config: {name}={shown(value, 500)} must be {wanted}")
        if value is not None and float in (kind, *get_args(kind)) and not isinstance(value, tuple):
            object.__setattr__(config, name, float(value))
