"""Models from disk: Hugging Face, native and megatron ``dist_checkpointing`` directories."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.checkpoint.load import Pretrained, describe_pretrained, load_pretrained
    from megatron_async.checkpoint.megatron.distributed import save_distributed
    from megatron_async.checkpoint.native import save_native

__all__ = [
    "Pretrained",
    "describe_pretrained",
    "load_pretrained",
    "save_distributed",
    "save_native",
]

_MODULES = {
    "Pretrained": "load",
    "describe_pretrained": "load",
    "load_pretrained": "load",
    "save_distributed": "megatron.distributed",
    "save_native": "native",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
