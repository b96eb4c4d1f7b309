"""The configuration of an engine from megatron-core's arguments and contexts."""

from __future__ import annotations

import logging
import os
from typing import Any

from megatron_async.config.engine_config import (
    DEFAULT_ASYNC_DEPTH,
    MAX_DEPTH,
    EngineConfig,
    check_config,
)
from megatron_async.errors import ConfigError
from megatron_async.megatron_api.context import DynamicInferenceContext
from megatron_async.megatron_api.inference_config import EngineSettings
from megatron_async.megatron_api.model import TextGenerationController
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.network import Network
from megatron_async.ranks.replica import data_parallel_rank
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch

DEPTH_VARIABLE = "MEGATRON_ASYNC_DEPTH"

logger = logging.getLogger(__name__)


def _depth(asynchronous: bool) -> int:
    """Return the depth of an engine that was given no configuration: the environment says it for
    scripts that are not to be changed."""
    text = os.environ.get(DEPTH_VARIABLE)
    if text is None:
        return DEFAULT_ASYNC_DEPTH if asynchronous else 0
    if not text.isdecimal() or int(text) > MAX_DEPTH:
        raise ConfigError(f"{DEPTH_VARIABLE}={text!r} must be an integer from 0 to {MAX_DEPTH}")
    return int(text)


def config_of(
    settings: EngineSettings, context: Any, controller: TextGenerationController
) -> EngineConfig:
    """The configuration of an engine that was given none."""
    model = controller.served.weights_owner
    seed = None
    if isinstance(context, DynamicInferenceContext) and context.inference_config is not None:
        seed = getattr(getattr(model, "config", None), "inference_sampling_seed", None)
    depth = _depth(settings.inference_async_scheduling)
    sizes = {} if context is None else {"max_requests": context.cache.sizes.max_requests}
    return EngineConfig(
        **sizes,
        depth=depth,
        enable_prefix_caching=settings.enable_prefix_caching,
        track_paused_request_events=settings.track_paused_request_events,
        inference_logging_step_interval=settings.inference_logging_step_interval,
        num_speculative_tokens=settings.num_speculative_tokens,
        recurrent_state_dtype=settings.recurrent_state_dtype,
        random_seed=(seed or 0) + (data_parallel_rank() if settings.offsets_seed else 0),
    )


def fit_parts(config: EngineConfig, context: Any, network: Network) -> None:
    """Check a configuration, that all parts of an engine are batch-invariant or none is, and that
    they have one number of drafts; and fit a context to the network's length.

    Raises:
        ConfigError: the configuration is wrong, or the parts differ.
    """
    check_config(config)
    parts = {}
    if isinstance(network, GPTNetwork):
        parts["GPTInferenceWrapper"] = network.batch_invariant
    cache = "EngineConfig" if context is None else "DynamicInferenceContext"
    if context is None:
        parts[cache] = config.batch_invariant
    else:
        fit_length(network, context)
        parts[cache] = context.cache.sizes.batch_invariant
        _check_drafts(config.num_speculative_tokens, context.cache.sizes)
    lacking = [name for name, value in parts.items() if not value]
    if lacking and (config.batch_invariant or any(parts.values())):
        raise ConfigError(
            f"batch_invariant=True is not said to {' and '.join(lacking)}: give it to both "
            f"GPTInferenceWrapper and {cache}, or to nothing"
        )


def _check_drafts(drafts: int, sizes: CacheSizes) -> None:
    """A step drafts as many tokens as its context has room for, whatever else is asked for."""
    if drafts not in (0, sizes.num_speculative_tokens):
        raise ConfigError(
            f"num_speculative_tokens={drafts} of EngineConfig, and {sizes.num_speculative_tokens} "
            "of DynamicInferenceContext: give the same number to both"
        )


def changes_of(context: Any, track_paused: bool, logging_interval: int) -> dict[str, Any]:
    """Fields of :class:`EngineConfig` that arguments by name, and the context, say otherwise."""
    changes: dict[str, Any] = {}
    if track_paused:
        changes["track_paused_request_events"] = True
    if logging_interval:
        changes["inference_logging_step_interval"] = logging_interval
    is_ours = isinstance(context, DynamicInferenceContext)
    if is_ours and not context.use_cuda_graphs_for_non_decode_steps:
        changes["capture_mixed_steps"] = False
    return changes


def fit_length(network: Network, context: ForwardBatch) -> None:
    """Requests may be no longer than the model takes, whatever the context was made for."""
    most = network.max_sequence_length
    if most is not None and context.max_sequence_length > most:
        logger.warning(
            "max_sequence_length=%d of the context exceeds the model's, which is taken: %d",
            context.max_sequence_length,
            most,
        )
        context.limit_length(most)


def chunk_of(sizes: CacheSizes, config: EngineConfig, chunked: bool) -> int | None:
    """Tokens of a prefill chunk where the context's ``max_tokens`` leaves no room for those that
    the configuration asks for, or for whole prompts; None where it does."""
    if sizes.max_tokens is None:
        return None
    rows = sizes.max_requests * (1 + sizes.num_speculative_tokens)
    length = sizes.max_sequence_length
    wanted = min(config.prefill_chunk_tokens, length) if chunked else length
    room: int = sizes.max_tokens - rows
    if room >= wanted:
        return None
    if room < 1:
        raise ConfigError(
            f"max_tokens={sizes.max_tokens} must be above max_requests times the tokens of a "
            f"row = {rows}, so that a prompt fits next to the decoding rows"
        )
    return room
