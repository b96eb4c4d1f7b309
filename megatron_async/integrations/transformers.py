"""The former address of :mod:`megatron_async.contrib.transformers`: its names, and a warning."""

from __future__ import annotations

import warnings
from typing import Any

from megatron_async.contrib import transformers as contrib

__all__ = contrib.__all__

warnings.warn(
    "megatron_async.integrations.transformers is now megatron_async.contrib.transformers",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(contrib, name)
