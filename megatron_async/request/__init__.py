"""What a user asks of an engine and gets back, with megatron-core's names. Its names are those of
:mod:`megatron_async.request.request`, loaded when they are asked for."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    from megatron_async.request import request

    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(request, name)
