"""Speculative asynchronous decode scheduling for megatron-core models.

The names below are imported on first use, so that the scheduler can be used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_async.version import __version__

if TYPE_CHECKING:
    from megatron_async.config import EngineConfig
    from megatron_async.context import DynamicInferenceContext
    from megatron_async.controller import TextGenerationController
    from megatron_async.engine import DynamicInferenceEngine
    from megatron_async.models.wrapper import GPTInferenceWrapper
    from megatron_async.requests import DynamicInferenceRequest, SamplingParams

_HOMES = {
    "DynamicInferenceContext": "megatron_async.context",
    "DynamicInferenceEngine": "megatron_async.engine",
    "DynamicInferenceRequest": "megatron_async.requests",
    "EngineConfig": "megatron_async.config",
    "GPTInferenceWrapper": "megatron_async.models.wrapper",
    "SamplingParams": "megatron_async.requests",
    "TextGenerationController": "megatron_async.controller",
}

__all__ = [
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceRequest",
    "EngineConfig",
    "GPTInferenceWrapper",
    "SamplingParams",
    "TextGenerationController",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
