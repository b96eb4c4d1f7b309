"""The former address of :mod:`megatron_async.weights.parallel_layouts`, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import megatron_async.weights.parallel_layouts as moved

warnings.warn(
    "megatron_async.checkpoint.parallel_layouts is now megatron_async.weights.parallel_layouts",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(moved, name)
