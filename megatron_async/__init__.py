"""Speculative asynchronous decode scheduling for megatron-core models.

The names below are imported on first use, so that the scheduler can be used without torch.
"""

from __future__ import annotations

import importlib
import os

from megatron_async.version import __version__

_package = os.path.dirname(os.path.realpath(__file__))
_checkout = os.path.dirname(_package)
_is_installed = os.path.exists(os.path.join(_package, "inference"))
if not _is_installed and os.path.isdir(os.path.join(_checkout, "inference")):
    # Not installed: the command line lies next to the package and is found from there.
    __path__.append(_checkout)

_OURS = {
    "DynamicInferenceEngine": "engine.engine",
    "DynamicInferenceRequest": "request",
    "EngineConfig": "config",
    "EngineSuspendedError": "errors",
    "FinishReason": "request",
    "RequestFuture": "request",
    "Rollout": "request",
    "SamplingParams": "sampling_params",
    "StepReport": "request",
    "StructuredOutputs": "grammar.spec",
    "TokenLogProbs": "request",
    "TokenOutput": "engine.output_processor",
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
