"""Speculative asynchronous decode scheduling for megatron-core models.

The names below are imported on first use, so that the scheduler can be used without torch.
"""

from __future__ import annotations

import importlib

from megatron_async.version import __version__

_OURS = {
    "DynamicInferenceEngine": "engine.engine",
    "DynamicInferenceRequest": "request.request",
    "EngineConfig": "config.engine_config",
    "EngineSuspendedError": "errors",
    "FinishReason": "request.request",
    "RequestFuture": "request.request",
    "Rollout": "request.request",
    "SamplingParams": "sampling_params",
    "Score": "request.scores",
    "StepReport": "request.request",
    "StructuredOutputs": "grammar.spec",
    "TokenLogProbs": "request.request",
    "TokenOutput": "engine.requests.output_processor",
}
_MEGATRONS = {
    "DynamicInferenceContext": "megatron_api.context",
    "GPTInferenceWrapper": "megatron_api.model",
    "InferenceConfig": "megatron_api.inference_config",
    "MegatronAsyncLLM": "megatron_api.llm",
    "MegatronLLM": "megatron_api.llm",
    "TextGenerationController": "megatron_api.model",
}
HOMES = _OURS | _MEGATRONS
"""Where each name lives; ``__init__.pyi`` has the same for type checkers."""

__all__ = [*sorted(HOMES), "__version__"]


def __getattr__(name: str) -> object:
    home = HOMES.get(name)
    if home is None:
        api = importlib.import_module("megatron_async.megatron_api")
        if name in api.HOMES:  # a further name of megatron-core's
            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
