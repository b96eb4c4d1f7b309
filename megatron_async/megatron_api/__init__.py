"""megatron-core's names for inference: a script written for it changes its imports and runs.

``docs/megatron.md`` says of each of their names what it does here. The classes are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HERE = "megatron_async.megatron_api"
HOMES = {
    "AsyncScheduleMode": (f"{_HERE}.inference_config", ""),
    "BlockAllocator": (f"{_HERE}.context", ""),
    "ContextOverflowError": ("megatron_async.errors", "RequestError"),
    "CudaGraphSizingDistribution": (f"{_HERE}.inference_config", ""),
    "DynamicInferenceContext": (f"{_HERE}.context", ""),
    "DynamicInferenceEngine": (f"{_HERE}.engine", ""),
    "DynamicInferenceEvent": ("megatron_async.request.request", ""),
    "DynamicInferenceEventType": ("megatron_async.request.request", ""),
    "DynamicInferenceRequest": ("megatron_async.request.request", ""),
    "DynamicInferenceRequestRecord": ("megatron_async.request.request", "DynamicInferenceRequest"),
    "EngineState": (f"{_HERE}.coordinator.states", ""),
    "EngineSuspendedError": ("megatron_async.errors", ""),
    "FinishedRequestRecord": (f"{_HERE}.coordinator.epochs", ""),
    "GPTInferenceWrapper": (f"{_HERE}.model", ""),
    "Headers": (f"{_HERE}.coordinator.headers", ""),
    "InferenceClient": (f"{_HERE}.coordinator.client", ""),
    "InferenceConfig": (f"{_HERE}.inference_config", ""),
    "KVCacheManagementMode": (f"{_HERE}.inference_config", ""),
    "MaxSequenceLengthOverflowError": ("megatron_async.errors", "RequestTooLongError"),
    "MegatronAsyncLLM": (f"{_HERE}.llm", ""),
    "MegatronLLM": (f"{_HERE}.llm", ""),
    "PrefixCachingCoordinatorPolicy": (f"{_HERE}.inference_config", ""),
    "PrefixCachingEvictionPolicy": (f"{_HERE}.inference_config", ""),
    "SamplingParams": ("megatron_async.sampling_params", ""),
    "Status": ("megatron_async.request.request", ""),
    "TextGenerationController": (f"{_HERE}.model", ""),
}
"""Where each name lives, and what it is called there if it is called something else;
``__init__.pyi`` has the same for type checkers."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        _refuse(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, called = HOMES[name]
    return getattr(importlib.import_module(module), called or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})


def _refuse(name: str) -> None:
    """Raises ImportError with the reason for a class that is not here on purpose."""
    if not name[0].isupper():
        return
    from megatron_async.megatron_api.main_tables import NOT_HERE

    if name in NOT_HERE:
        raise ImportError(f"{__name__} has no {name}: {NOT_HERE[name].note}", name=__name__)
