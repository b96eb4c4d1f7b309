"""What one step and one cache can hold, from a context and a configuration."""

from __future__ import annotations

from megatron_async.config import EngineConfig
from megatron_async.errors import ConfigError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.scheduler.limits import Limits

CHUNKS_AT_ONCE = 4
"""Prefill chunks that fit into a forward beside full decode rows, unless its size is given."""


def limits_of(
    context: DynamicInferenceContext, config: EngineConfig, *, enable_chunked_prefill: bool
) -> Limits:
    """The scheduler's limits; the context's sizes win over the configuration's.

    Raises:
        ConfigError: a chunk would not fit into a forward beside the decoding rows.
    """
    # No prompt is longer, so a larger chunk would only ask for memory.
    chunk = min(config.prefill_chunk_tokens, context.max_sequence_length)
    if not enable_chunked_prefill:
        chunk = context.max_sequence_length
    least = context.max_requests + chunk
    max_tokens = config.max_tokens if context.max_tokens is None else context.max_tokens
    if max_tokens is None:
        max_tokens = context.max_requests + CHUNKS_AT_ONCE * chunk
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    # Nor does a step hold more than a chunk in each row.
    max_tokens = min(max_tokens, context.max_requests * chunk)
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
