"""Text to token ids and back. Its names are those of
:mod:`megatron_async.tokenizer.tokenizer`, loaded when they are asked for."""

from __future__ import annotations

import importlib


def __getattr__(name: str) -> object:
    if not name[:1].isupper():  # a module of this package, or nothing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_async.tokenizer.tokenizer"), name)
