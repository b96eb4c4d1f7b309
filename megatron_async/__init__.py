"""Speculative asynchronous decode scheduling for megatron-core models.

The names below are imported on first use, so that the scheduler can be used without torch.
"""

from __future__ import annotations

import importlib
import os

from megatron_async.version import __version__

TYPE_CHECKING = False  # typing's takes milliseconds, in which Ctrl-C is a traceback

if TYPE_CHECKING:
    from typing import Any

    from megatron_async.config import EngineConfig
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.engine.output_processor import TokenOutput
    from megatron_async.grammar.spec import StructuredOutputs
    from megatron_async.models.wrapper import GPTInferenceWrapper
    from megatron_async.request import (
        DynamicInferenceRequest,
        FinishReason,
        RequestFuture,
        Rollout,
        StepReport,
        TokenLogProbs,
    )
    from megatron_async.runner.context import DynamicInferenceContext
    from megatron_async.runner.controller import TextGenerationController
    from megatron_async.sampling_params import SamplingParams

_package = os.path.dirname(os.path.realpath(__file__))
_checkout = os.path.dirname(_package)
_is_installed = os.path.exists(os.path.join(_package, "inference"))
if not _is_installed and os.path.isdir(os.path.join(_checkout, "inference")):
    # Not installed: the command line lies next to the package and is found from there.
    __path__.append(_checkout)

_HOMES = {
    "DynamicInferenceContext": "megatron_async.runner.context",
    "DynamicInferenceEngine": "megatron_async.engine.engine",
    "DynamicInferenceRequest": "megatron_async.request",
    "EngineConfig": "megatron_async.config",
    "FinishReason": "megatron_async.request",
    "GPTInferenceWrapper": "megatron_async.models.wrapper",
    "RequestFuture": "megatron_async.request",
    "Rollout": "megatron_async.request",
    "SamplingParams": "megatron_async.sampling_params",
    "StepReport": "megatron_async.request",
    "StructuredOutputs": "megatron_async.grammar.spec",
    "TextGenerationController": "megatron_async.runner.controller",
    "TokenLogProbs": "megatron_async.request",
    "TokenOutput": "megatron_async.engine.output_processor",
}

__all__ = [
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceRequest",
    "EngineConfig",
    "FinishReason",
    "GPTInferenceWrapper",
    "RequestFuture",
    "Rollout",
    "SamplingParams",
    "StepReport",
    "StructuredOutputs",
    "TextGenerationController",
    "TokenLogProbs",
    "TokenOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
