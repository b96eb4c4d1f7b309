"""The configuration of an engine. Its names are those of
:mod:`megatron_async.config.engine_config`, loaded when they are asked for."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    from megatron_async.config import engine_config

    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(engine_config, name)
