"""``generate_batch`` of transformers over our engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from megatron_async.config.engine_config import EngineConfig
from megatron_async.contrib.transformers.engine.build import engine_of
from megatron_async.contrib.transformers.engine.requests import output_of, sampling_params


def async_generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    *,
    engine_config: EngineConfig | None = None,
    weights: str = "copy",
    max_new_tokens: int | None = None,
    log_probs: bool = False,
) -> dict[str, GenerationOutput]:
    """Decode token-id prompts with the engine; returns what ``generate_batch`` returns.

    Args:
        model: a transformers model of a supported type; its device and dtype are used.
        generation_config: None takes the model's. ``num_return_sequences`` makes further requests
            named ``req_N__child#M``, before their parent as in transformers.
        engine_config: see :func:`engine_of`.
        weights: ``"copy"``, or ``"take"``, which uses ``model`` up.
        max_new_tokens: in place of the generation config's.
        log_probs: results have log-probabilities.

    Raises:
        CheckpointError: the model is not supported.
        ValueError: the generation config asks for something that the engine cannot do.
        RequestError: a prompt cannot be served.
    """
    if not inputs:
        return {}
    config = model.generation_config if generation_config is None else generation_config
    copies = config.num_return_sequences or 1
    names, prompts, params = [], [], []
    for number, ids in enumerate(inputs):
        children = [f"req_{number}__child#{child}" for child in range(copies - 1)]
        for name in (*children, f"req_{number}"):
            names.append(name)
            prompts.append([int(token) for token in ids])
            params.append(
                sampling_params(
                    config, len(ids), max_new_tokens=max_new_tokens, log_probs=log_probs
                )
            )
    lengths = [
        len(p) + (s.num_tokens_to_generate or 0) for p, s in zip(prompts, params, strict=True)
    ]
    with engine_of(model, engine_config, weights=weights, lengths=lengths) as engine:
        created = time.perf_counter()
        requests = engine.generate(prompts, params)
    pairs = zip(names, requests, strict=True)
    return {name: output_of(name, request, created) for name, request in pairs}
