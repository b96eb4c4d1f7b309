"""Messages and records as bytes or as plain data, and back, as their types declare.

Types are msgspec's structs, dataclasses and named tuples over Python's own types and torch's
dtypes, which go by their names; several kinds of messages are a union of tagged structs. What
arrives has the declared fields and types, or is refused. Nothing that arrives is executed, and
nothing is unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


def _own(value: Any) -> Any:
    """Return what is of a subclass of Python's own types, such as numpy's float64, as of those; and
    a dtype of torch as its name."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    torch = sys.modules.get("torch")  # processes without it have no dtypes
    if torch is not None and isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"an object of type {type(value).__name__} is no data that is sent or written")


def _typed(kind: type, data: Any) -> Any:
    """The inverse of :func:`_own` for a dtype; msgspec knows all other types of messages.

    Raises:
        ValueError: the data is no dtype's name.
    """
    import torch  # only a type that has dtypes comes here

    found = getattr(torch, data, None) if kind is torch.dtype and isinstance(data, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{data!r} is no {kind.__module__}.{kind.__name__}")
    return found


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_own).encode
"""A message as msgpack; from any thread."""
encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""A value as JSON text, for clients; from any thread."""


def parse_json(text: bytes) -> Any:
    """The value of JSON text, faster than the standard library's parser and stricter: no NaN, no
    lone surrogate.

    Raises:
        ValueError: it is no JSON; says why.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def parse_msgpack(data: bytes) -> Any:
    """The value of msgpack that others have written, in Python's own types.

    Raises:
        ValueError: it is no msgpack; says why.
    """
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


class Codec(Generic[T]):
    """Messages as msgpack.

    Args:
        kinds: the type of the messages that are decoded.

    Attributes:
        encode: a message as bytes; from any thread.
    """

    def __init__(self, kinds: Any) -> None:
        self.encode: Callable[[T], bytes] = encode
        self._decode = msgspec.msgpack.Decoder(kinds, dec_hook=_typed).decode

    def decode(self, data: bytes | memoryview) -> T:
        """The inverse of :attr:`encode`, from any thread.

        Raises:
            ValueError: it is no message; says what is wrong where.
        """
        try:
            message: T = self._decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"this is not a message: {error}") from None
        return message


def to_plain(value: Any, hook: Callable[[Any], Any] = _own) -> Any:
    """A value in the types of JSON, integers as keys of mappings included; sequences may be tuples.

    Args:
        hook: makes plain data of what no type of msgspec's covers.
    """
    return msgspec.to_builtins(value, enc_hook=hook)


def from_plain(data: Any, kind: Any) -> Any:
    """A value of type ``kind`` from plain data, which may have gone through JSON text.

    Raises:
        ValueError: it is none; says what is wrong where.
    """
    return msgspec.convert(data, kind, str_keys=True, dec_hook=_typed)
