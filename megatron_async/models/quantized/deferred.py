"""Whether layers that are built now may keep e4m3, which is decided later (``linear.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

Class = TypeVar("Class", bound=type)

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def may_be_quantized() -> Iterator[None]:
    """Layers that are built inside may keep e4m3."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def as_built(layer: Class) -> Class:
    """``layer``, or inside of :func:`may_be_quantized` its subclass that may keep e4m3."""
    if not _deferred.get():
        return layer
    from megatron_async.models.quantized.linear import quantizable_class

    return cast(Class, quantizable_class(layer))


def defer(layer: Any, config: Any) -> None:
    """:func:`as_built` for a layer that was built just now, whose builder takes no subclass."""
    if _deferred.get():
        from megatron_async.models.quantized.linear import make_quantizable

        make_quantizable(layer, config)
