"""What one step and one cache can hold, from a context and a configuration."""

from __future__ import annotations

from megatron_async.config import EngineConfig
from megatron_async.context import DynamicInferenceContext
from megatron_async.errors import ConfigError
from megatron_async.scheduler.limits import Limits


def limits_of(
    context: DynamicInferenceContext, config: EngineConfig, *, enable_chunked_prefill: bool
) -> Limits:
    """The scheduler's limits; the context's sizes win over the configuration's.

    Raises:
        ConfigError: a chunk would not fit into a forward beside the decoding rows.
    """
    chunk = config.prefill_chunk_tokens
    if not enable_chunked_prefill:
        chunk = context.max_sequence_length
    least = context.max_requests + chunk
    max_tokens = context.max_tokens
    if max_tokens is None:
        max_tokens = max(config.effective_max_tokens, least)
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    return Limits(
        max_requests=context.max_requests,
        slot_count=context.slot_count,
        max_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        block_size=context.block_size_tokens,
        block_count=context.block_count,
        max_grants=2 * context.max_requests + 4 * context.max_blocks_per_request,
        enable_prefix_caching=config.enable_prefix_caching,
    )
