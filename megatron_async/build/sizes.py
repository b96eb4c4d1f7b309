"""The sizes of an engine's memory: as the user gave them, and else by what is free.

What nobody gave is never the reason of a refusal: it is made smaller, and the log says so.
"""

from __future__ import annotations

import dataclasses
import logging

from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.memory import FREE_IT, GIB
from megatron_async.drafting.choose import layers_draft
from megatron_async.errors import CacheTooLargeError, ConfigError
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.served import ModelDescription
from megatron_async.runner.memory.cache_sizes import CacheSizes

logger = logging.getLogger(__name__)

DEFAULT_CACHE_GIB = {"cpu": 1.0, "cuda": 16.0}
BLOCK_SIZE_TOKENS = {"cpu": 16, "cuda": 64}
"""The smallest blocks that cost nothing: Triton's attention reads tiles of 64 tokens, each by one
entry of the block table as long as it is of one block."""
DEFAULT_SNAPSHOT_GIB = {"cpu": 0.25, "cuda": 4.0}
SNAPSHOTS_PER_REQUEST = 4

DEFAULT_AUTOMATA_BYTES = {"cpu": 0, "cuda": 256 << 20}
"""The pool of token automata: 13,000 states with 152,000 ids. Ten functions have 4,000 to 10,000.
On a CPU S would make masks on the cores that the forward needs."""
AUTOMATA_SHARE = 1 / 16
"""The most of what is free beside the steps that a default pool takes."""

FREE_SHARE = 0.75
"""The most of what is free beside the steps that a default cache takes."""
SNAPSHOT_SHARE = 0.125
"""The same of the default snapshots."""
STEPS_GIB = {"cpu": 0.0, "cuda": 0.75}
"""What steps take beside logits: code of kernels, workspaces, graphs and streams."""
LOGITS_COPIES = 4
"""A step has the logits of all its rows so often, in fp32."""
MOST_DEFAULT_TOKENS = 2**20
"""Most tokens of a request, unless the user allows more: a file may say any number."""


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


def beside_steps(
    model: ModelDescription, config: EngineConfig, device: str, free: int | None
) -> int | None:
    """What steps leave of ``free`` bytes; None for None.

    Raises:
        CacheTooLargeError: they leave none, and nobody has said how large the cache is.
    """
    if free is None or not STEPS_GIB[device]:
        return free
    rows = config.max_requests * (1 + config.num_speculative_tokens)
    steps = int(STEPS_GIB[device] * GIB) + LOGITS_COPIES * 4 * rows * model.vocab_size
    if free <= steps and config.block_count is None and config.buffer_size_gb is None:
        raise CacheTooLargeError(
            f"steps of max_requests={config.max_requests} take about {steps / GIB:,.1f} GiB, and "
            f"{free / GIB:,.1f} GiB are free beside the weights; lower max_requests, take a "
            f"smaller model, or {FREE_IT}"
        )
    return max(free - steps, 0)


def automata_bytes_of(config: EngineConfig, device: str, free: int | None) -> int:
    """Bytes of the pool of token automata.

    Args:
        free: see :func:`sizes_of`.
    """
    if config.guided_automata_bytes is not None:
        return config.guided_automata_bytes
    wanted = DEFAULT_AUTOMATA_BYTES[device]
    return wanted if free is None else min(wanted, int(AUTOMATA_SHARE * free))


def sizes_of(
    model: ModelDescription,
    draft: ModelDescription | None,
    config: EngineConfig,
    device: str,
    free: int | None = None,
) -> CacheSizes:
    """The sizes of the cache that a configuration asks for.

    Args:
        free: bytes of the device's memory, beside the weights and what steps take; None is as many
            as may be needed.

    Raises:
        ConfigError: a length exceeds the model's, or the cache cannot hold what is asked.
    """
    spec, further = cached_tokens(model, draft, config)
    token_bytes = spec.token_bytes + further
    length = _length(model, config)
    block_size = config.block_size_tokens or BLOCK_SIZE_TOKENS[device]
    block_count, asked = config.block_count, None
    if block_count is None and config.buffer_size_gb is None:
        block_count = _default_blocks(length, token_bytes, block_size, config, device, free)
        asked = f"max_sequence_length={length}"
    sizes = CacheSizes.of(
        token_bytes,
        max_sequence_length=length,
        buffer_size_gb=config.buffer_size_gb,
        paused_buffer_size_gb=config.paused_buffer_size_gb,
        block_count=block_count,
        asked=asked,
        max_requests=config.max_requests,
        slot_count=config.max_requests * (config.effective_depth + 1),
        max_tokens=config.max_tokens,
        block_size_tokens=block_size,
        num_cuda_graphs=config.num_cuda_graphs,
        batch_invariant=config.batch_invariant,
        num_speculative_tokens=config.num_speculative_tokens,
        releasable=config.enable_sleep_mode,
    )
    if config.max_sequence_length is not None:
        return sizes
    room = sizes.block_count * sizes.block_size_tokens + 1  # the last token is never written
    served = min(length, room)
    if served != model.max_sequence_length:
        logger.log(
            logging.INFO if asked is None else logging.WARNING,
            "requests may have up to %s tokens of the model's %s: %s",
            f"{served:,}",
            f"{model.max_sequence_length:,}",
            "the KV cache has no more" if served == room else "set max_sequence_length for more",
        )
    return dataclasses.replace(sizes, max_sequence_length=served)


def _length(model: ModelDescription, config: EngineConfig) -> int:
    """The most tokens of a request, before the cache has a say."""
    most, asked = model.max_sequence_length, config.max_sequence_length
    if most is None and asked is None:
        raise ConfigError("max_sequence_length is missing, and the model does not say it; set it")
    if asked is not None and most is not None and asked > most:
        raise ConfigError(
            f"max_sequence_length={asked} exceeds the model's {most}; lower it or leave it out"
        )
    if asked is not None:
        return asked
    limits = [most, MOST_DEFAULT_TOKENS]
    if config.num_speculative_tokens:  # drafts do not cross it
        limits.append(model.rotation_limit)
    return min(limit for limit in limits if limit is not None)


def _default_blocks(
    length: int,
    token_bytes: int,
    block_size: int,
    config: EngineConfig,
    device: str,
    free: int | None,
) -> int:
    """All requests at full length, as far as the default size has room; one at least, as far as
    memory is free."""
    block_bytes = max(token_bytes, 1) * block_size
    per_request = -(-length // block_size)
    affordable = int(DEFAULT_CACHE_GIB[device] * GIB) // block_bytes
    wanted = max(per_request, min(config.max_requests * per_request, affordable))
    if free is None:
        return wanted
    room = int(FREE_SHARE * free) // block_bytes
    if config.max_sequence_length is not None:
        return max(per_request, min(wanted, room))
    if room < 1:
        raise CacheTooLargeError(
            f"a block of block_size_tokens={block_size} takes "
            f"{block_bytes / GIB:,.3f} GiB in the KV cache, and {free / GIB:,.3f} GiB are free; "
            f"lower block_size_tokens, take a smaller model, or {FREE_IT}"
        )
    return min(wanted, room)


def snapshot_count_of(
    model: ModelDescription,
    sizes: CacheSizes,
    config: EngineConfig,
    device: str,
    free: int | None = None,
) -> int:
    """How many snapshots of recurrent state the prefix cache has; 0 without recurrent layers.

    Args:
        free: see :func:`sizes_of`.
    """
    if model.state_bytes is None or not config.enable_prefix_caching:
        return 0
    if config.state_snapshot_count is not None:
        return config.state_snapshot_count
    room = int(DEFAULT_SNAPSHOT_GIB[device] * GIB)
    if free is not None:
        room = min(room, int(SNAPSHOT_SHARE * free))
    wanted = min(SNAPSHOTS_PER_REQUEST * sizes.max_requests, room // model.state_bytes)
    return max(1, wanted)
