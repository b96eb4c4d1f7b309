"""How large an engine's caches and steps are. Pure: the device is a name."""

from __future__ import annotations

from megatron_async.config import EngineConfig, draft_windows
from megatron_async.device.memory import GIB
from megatron_async.drafting.choose import Drafting, layers_draft
from megatron_async.errors import ConfigError
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.served import ModelDescription
from megatron_async.runner.cache_sizes import CacheSizes
from megatron_async.scheduler.limits import Limits

DEFAULT_CACHE_GIB = {"cpu": 1.0, "cuda": 16.0}
DEFAULT_SNAPSHOT_GIB = {"cpu": 0.25, "cuda": 4.0}
SNAPSHOTS_PER_REQUEST = 4

CHUNKS_AT_ONCE = 4
"""Prefill chunks that fit into a forward next to full decode rows, unless its size is given."""


def cached_tokens(
    model: ModelDescription, draft: ModelDescription | None, config: EngineConfig
) -> tuple[KVCacheSpec, int]:
    """What a token takes in the KV cache, without layers that do not draft; and its bytes in the
    cache of a model that drafts."""
    if layers_draft(config, has_draft_model=draft is not None):
        return model.cached, 0
    if draft is None or not config.num_speculative_tokens:
        return model.cached.decoder, 0
    return model.cached.decoder, draft.cached.decoder.token_bytes


def sizes_of(
    model: ModelDescription, draft: ModelDescription | None, config: EngineConfig, device: str
) -> CacheSizes:
    """The sizes of the cache that a configuration asks for.

    Raises:
        ConfigError: a length exceeds the model's, or the cache cannot hold what is asked.
    """
    most = model.max_sequence_length
    length = config.max_sequence_length or most
    if length is None or (most is not None and length > most):
        raise ConfigError(
            f"max_sequence_length={length} exceeds the model's {most}; lower it or leave it out"
        )
    spec, further = cached_tokens(model, draft, config)
    if further and draft is not None and length > (draft.max_sequence_length or length):
        raise ConfigError(
            f"draft_model takes {draft.max_sequence_length} tokens and requests may have "
            f"{length}; set max_sequence_length to that or less"
        )
    token_bytes = spec.token_bytes + further
    block_count = config.block_count
    if block_count is None and config.buffer_size_gb is None:
        per_request = -(-length // config.block_size_tokens)
        block_bytes = max(token_bytes, 1) * config.block_size_tokens
        affordable = int(DEFAULT_CACHE_GIB[device] * GIB) // block_bytes
        block_count = max(per_request, min(config.max_requests * per_request, affordable))
    return CacheSizes.of(
        token_bytes,
        max_sequence_length=length,
        buffer_size_gb=config.buffer_size_gb,
        paused_buffer_size_gb=config.paused_buffer_size_gb,
        block_count=block_count,
        max_requests=config.max_requests,
        slot_count=config.max_requests * (config.effective_depth + 1),
        max_tokens=config.max_tokens,
        block_size_tokens=config.block_size_tokens,
        num_cuda_graphs=config.num_cuda_graphs,
        batch_invariant=config.batch_invariant,
        num_speculative_tokens=config.num_speculative_tokens,
        releasable=config.enable_sleep_mode,
    )


def snapshot_count_of(
    model: ModelDescription, sizes: CacheSizes, config: EngineConfig, device: str
) -> int:
    """How many snapshots of recurrent state the prefix cache has; 0 without recurrent layers."""
    if model.state_bytes is None or not config.enable_prefix_caching:
        return 0
    if config.state_snapshot_count is not None:
        return config.state_snapshot_count
    affordable = int(DEFAULT_SNAPSHOT_GIB[device] * GIB) // model.state_bytes
    return max(1, min(SNAPSHOTS_PER_REQUEST * sizes.max_requests, affordable))


def micro_batches_of(model: ModelDescription, config: EngineConfig, device: str) -> int:
    """Return what the configuration says, or one for each pipeline stage. On GPUs, where several
    have not run yet, return one."""
    if config.pipeline_micro_batches is not None:
        return config.pipeline_micro_batches
    return 1 if device == "cuda" else model.stages


def limits_of(
    sizes: CacheSizes,
    config: EngineConfig,
    model: ModelDescription,
    drafting: Drafting,
    device: str,
    *,
    enable_chunked_prefill: bool = True,
    state_snapshots: int | None = None,
) -> Limits:
    """The scheduler's limits; the cache's sizes win over the configuration's.

    Args:
        state_snapshots: None without recurrent layers.

    Raises:
        ConfigError: a chunk would not fit into a forward next to the decoding rows; drafts would
            cross the model's ``rotation_limit``.
    """
    window = 1 + sizes.num_speculative_tokens
    length, rotation_limit = sizes.max_sequence_length, model.rotation_limit
    if rotation_limit is not None and rotation_limit >= length:
        rotation_limit = None
    if rotation_limit is not None and window > 1:
        raise ConfigError(
            f"num_speculative_tokens={window - 1} needs a max_sequence_length of at most "
            f"{rotation_limit} with this model, whose rotary embeddings change there"
        )
    # No prompt is longer, so a larger chunk would only ask for memory.
    chunk = min(config.prefill_chunk_tokens, length) if enable_chunked_prefill else length
    least = sizes.max_requests * window + chunk
    max_tokens = config.max_tokens if sizes.max_tokens is None else sizes.max_tokens
    if max_tokens is None:
        max_tokens = sizes.max_requests * window + CHUNKS_AT_ONCE * chunk
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    # Nor does a step hold more than a chunk, or a window of drafts, in each row.
    max_tokens = min(max_tokens, sizes.max_requests * max(chunk, window))
    per_row = 1 + -(-(window + drafting.lookahead) // sizes.block_size_tokens)
    return Limits(
        max_requests=sizes.max_requests,
        slot_count=sizes.slot_count,
        max_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        block_size=sizes.block_size_tokens,
        block_count=sizes.block_count,
        max_assignments=sizes.max_requests * per_row + 4 * sizes.max_blocks_per_request,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=draft_windows(window - 1, adaptive=config.adaptive_speculation),
        lookahead=drafting.lookahead,
        admit_tokens=drafting.wants_tokens,
        paused_block_count=sizes.paused_block_count,
        rotation_limit=rotation_limit,
        # Drafting writes behind the last token, and reads from there.
        attention_window=model.attention_window if window == 1 else None,
        state_snapshots=state_snapshots,
        micro_batches=min(micro_batches_of(model, config, device), sizes.max_requests),
    )
