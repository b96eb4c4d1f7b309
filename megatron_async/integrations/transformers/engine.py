"""The engine over a transformers model object."""

from __future__ import annotations

from typing import Any

from megatron_async.config import EngineConfig
from megatron_async.engine.build import build_context, resolve_device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.integrations.transformers.weights import convert_model
from megatron_async.models.wrapper import GPTInferenceWrapper
from megatron_async.runner.controller import TextGenerationController


def engine_of(
    model: Any, config: EngineConfig | None = None, *, weights: str = "copy"
) -> DynamicInferenceEngine:
    """An engine with the weights of a transformers model, on its device and in its dtype.

    Args:
        config: None is asynchronous at depth 2 with the defaults of everything else. Its
            ``device`` and ``dtype`` are the model's.
        weights: ``"copy"`` or ``"take"``, see :func:`convert_model`.

    Raises:
        CheckpointError: the model's type, or one of its features, is not supported.
        ConfigError: the configuration does not suit the model.
    """
    if config is None:
        config = EngineConfig(inference_async_scheduling=True, depth=2)
    device = resolve_device(str(model.device))
    converted = convert_model(model, weights, allow_non_finite=config.allow_non_finite_weights)
    wrapper = GPTInferenceWrapper(converted.model)
    return DynamicInferenceEngine(
        TextGenerationController(wrapper, None),
        build_context(wrapper, config, device),
        config=config,
        model_name=type(model).__name__,
    )
