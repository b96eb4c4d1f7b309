"""The engine over a transformers model object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_async.config.engine_config import DEFAULT_BLOCK_SIZE_TOKENS, EngineConfig
from megatron_async.contrib.transformers.engine.weights import convert_model
from megatron_async.device import resolve_device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel

MOST_REQUESTS = 128
"""At once, where the batch decides."""
CACHE_SHARE = 0.9
"""The share of a GPU's free memory that the KV cache of a batch may have."""


def engine_of(
    model: Any,
    config: EngineConfig | None = None,
    *,
    weights: str = "copy",
    lengths: Sequence[int] = (),
) -> DynamicInferenceEngine:
    """An engine with the weights of a transformers model, on its device and in its dtype.

    Args:
        config: None is asynchronous at depth 2 with the defaults of everything else, or with room
            for a batch of ``lengths``. Its ``device`` and ``dtype`` are the model's.
        weights: ``"copy"`` or ``"take"``, see :func:`convert_model`.
        lengths: most tokens of each request, prompt and generation, where they are known.

    Raises:
        CheckpointError: the model's type, or one of its features, is not supported.
        ConfigError: the configuration does not suit the model.
    """
    device = resolve_device(str(model.device))
    allow = config is not None and config.allow_non_finite_weights
    converted = convert_model(model, weights, allow_non_finite=allow)
    network = GPTNetwork(converted.model)
    if config is None:
        config = config_for(network, lengths, device)
    return DynamicInferenceEngine(ServedModel(network=network, name=type(model).__name__), config)


def config_for(network: GPTNetwork, lengths: Sequence[int], device: torch.device) -> EngineConfig:
    """Depth 2, and on a GPU a KV cache for all requests at once as far as there is memory."""
    plain = EngineConfig(depth=2)
    if not lengths or device.type != "cuda":
        return plain
    size = DEFAULT_BLOCK_SIZE_TOKENS
    blocks = sorted((-(-length // size) for length in lengths), reverse=True)[:MOST_REQUESTS]
    free, _ = torch.cuda.mem_get_info(device)
    affordable = int(free * CACHE_SHARE) // (network.kv_cache_spec.token_bytes * size)
    # One more for each request: it is taken before the last one's token is known.
    wanted = sum(blocks) + len(blocks)
    return replace(
        plain,
        max_requests=len(blocks),
        max_sequence_length=min(max(lengths), network.max_sequence_length),
        block_count=max(blocks[0] + 1, min(wanted, affordable)),
    )
