"""megatron-core's names for inference: a script written for it changes its imports and runs.

``docs/megatron.md`` says of each of their names what it does here. The classes are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.errors import EngineSuspendedError
    from megatron_async.errors import RequestError as ContextOverflowError
    from megatron_async.errors import RequestTooLongError as MaxSequenceLengthOverflowError
    from megatron_async.megatron_api.context import BlockAllocator, DynamicInferenceContext
    from megatron_async.megatron_api.engine import DynamicInferenceEngine, EngineState
    from megatron_async.megatron_api.inference_config import (
        AsyncScheduleMode,
        CudaGraphSizingDistribution,
        InferenceConfig,
        KVCacheManagementMode,
        PrefixCachingCoordinatorPolicy,
        PrefixCachingEvictionPolicy,
    )
    from megatron_async.megatron_api.llm import MegatronAsyncLLM, MegatronLLM
    from megatron_async.megatron_api.model import GPTInferenceWrapper, TextGenerationController
    from megatron_async.request import (
        DynamicInferenceEvent,
        DynamicInferenceEventType,
        DynamicInferenceRequest,
        Status,
    )
    from megatron_async.request import DynamicInferenceRequest as DynamicInferenceRequestRecord
    from megatron_async.sampling_params import SamplingParams

_HERE = "megatron_async.megatron_api"
HOMES = {
    "AsyncScheduleMode": (f"{_HERE}.inference_config", ""),
    "BlockAllocator": (f"{_HERE}.context", ""),
    "ContextOverflowError": ("megatron_async.errors", "RequestError"),
    "CudaGraphSizingDistribution": (f"{_HERE}.inference_config", ""),
    "DynamicInferenceContext": (f"{_HERE}.context", ""),
    "DynamicInferenceEngine": (f"{_HERE}.engine", ""),
    "DynamicInferenceEvent": ("megatron_async.request", ""),
    "DynamicInferenceEventType": ("megatron_async.request", ""),
    "DynamicInferenceRequest": ("megatron_async.request", ""),
    "DynamicInferenceRequestRecord": ("megatron_async.request", "DynamicInferenceRequest"),
    "EngineState": (f"{_HERE}.engine", ""),
    "EngineSuspendedError": ("megatron_async.errors", ""),
    "GPTInferenceWrapper": (f"{_HERE}.model", ""),
    "InferenceConfig": (f"{_HERE}.inference_config", ""),
    "KVCacheManagementMode": (f"{_HERE}.inference_config", ""),
    "MaxSequenceLengthOverflowError": ("megatron_async.errors", "RequestTooLongError"),
    "MegatronAsyncLLM": (f"{_HERE}.llm", ""),
    "MegatronLLM": (f"{_HERE}.llm", ""),
    "PrefixCachingCoordinatorPolicy": (f"{_HERE}.inference_config", ""),
    "PrefixCachingEvictionPolicy": (f"{_HERE}.inference_config", ""),
    "SamplingParams": ("megatron_async.sampling_params", ""),
    "Status": ("megatron_async.request", ""),
    "TextGenerationController": (f"{_HERE}.model", ""),
}
"""Where each name lives, and what it is called there if it is called something else."""

__all__ = [
    "AsyncScheduleMode",
    "BlockAllocator",
    "ContextOverflowError",
    "CudaGraphSizingDistribution",
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineState",
    "EngineSuspendedError",
    "GPTInferenceWrapper",
    "InferenceConfig",
    "KVCacheManagementMode",
    "MaxSequenceLengthOverflowError",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
    "SamplingParams",
    "Status",
    "TextGenerationController",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        _refuse(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, called = HOMES[name]
    return getattr(importlib.import_module(module), called or name)


def _refuse(name: str) -> None:
    """Raises ImportError with the reason for a class that is not here on purpose."""
    if not name[0].isupper():
        return
    from megatron_async.megatron_api.main_tables import NOT_HERE

    if name in NOT_HERE:
        raise ImportError(f"{__name__} has no {name}: {NOT_HERE[name].note}", name=__name__)
