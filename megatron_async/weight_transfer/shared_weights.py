"""The former address of :mod:`megatron_async.weights.shared_memory`: its names, and a warning."""

from __future__ import annotations

import warnings
from typing import Any

import megatron_async.weights.shared_memory as moved

warnings.warn(
    "megatron_async.weight_transfer.shared_weights is now megatron_async.weights.shared_memory",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(moved, name)
