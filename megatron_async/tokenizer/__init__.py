"""Text to token ids and back. Its names are those of
:mod:`megatron_async.tokenizer.tokenizer`, loaded when they are asked for."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    from megatron_async.tokenizer import tokenizer

    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(tokenizer, name)
