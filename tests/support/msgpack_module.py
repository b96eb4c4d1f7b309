"""``msgpack`` for megatron-core's own clients, which need it: the real one, or as much of it as
they call, over what this package has."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import msgspec


def msgpack_module() -> Any:
    """The module."""
    if importlib.util.find_spec("msgpack") is not None:
        return importlib.import_module("msgpack")
    return types.SimpleNamespace(packb=_packb, unpackb=_unpackb)


def _packb(value: Any, *, use_bin_type: bool) -> bytes:
    assert use_bin_type
    return msgspec.msgpack.encode(value)


def _unpackb(data: bytes, *, raw: bool) -> Any:
    assert not raw
    return msgspec.msgpack.decode(data)
