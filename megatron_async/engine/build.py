"""Device, cache and recurrent states for a wrapped model and a configuration."""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_async.config import EngineConfig
from megatron_async.device.memory import GIB
from megatron_async.drafting.choose import layers_draft
from megatron_async.errors import ConfigError
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.recurrent_state_spec import RecurrentStateSpec
from megatron_async.runner.context import DynamicInferenceContext

logger = logging.getLogger(__name__)

DEFAULT_CACHE_GIB = {"cpu": 1.0, "cuda": 16.0}
DEFAULT_SNAPSHOT_GIB = {"cpu": 0.25, "cuda": 4.0}
SNAPSHOTS_PER_REQUEST = 4


def resolve_device(name: str | None) -> torch.device:
    """The torch device that ``name`` means; None takes a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in DEFAULT_CACHE_GIB:
        raise ConfigError(f"device={name!r} is not known; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r} but PyTorch finds no GPU; use cpu")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name!r} but there are {torch.cuda.device_count()} GPUs; use a lower index"
            )
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")  # there is one, whatever its number


def build_context(
    wrapper: Any, config: EngineConfig, device: torch.device, slot_count: int | None = None
) -> DynamicInferenceContext:
    """The cache and slots for a wrapped model; ``slot_count`` None is what the depth needs.

    Raises:
        ConfigError: a length exceeds the model's, or the cache cannot hold what is asked.
    """
    length = config.max_sequence_length or wrapper.max_sequence_length
    if length > wrapper.max_sequence_length:
        raise ConfigError(
            f"max_sequence_length={length} exceeds the model's {wrapper.max_sequence_length}; "
            "lower it or leave it out"
        )
    draft_model = getattr(wrapper, "draft_model", None)
    spec, draft_spec = kv_cache_specs(wrapper, config)
    further = 0
    if draft_spec is not None and draft_model is not None:
        if length > draft_model.max_sequence_length:
            raise ConfigError(
                f"draft_model takes {draft_model.max_sequence_length} tokens and requests may have "
                f"{length}; set max_sequence_length to that or less"
            )
        further = draft_spec.token_bytes
    block_count = config.block_count
    if block_count is None and config.buffer_size_gb is None:
        per_request = -(-length // config.block_size_tokens)
        block_bytes = max(spec.token_bytes + further, 1) * config.block_size_tokens
        affordable = int(DEFAULT_CACHE_GIB[device.type] * GIB) // block_bytes
        block_count = max(per_request, min(config.max_requests * per_request, affordable))
    context = DynamicInferenceContext(
        params_dtype=spec.dtype,
        num_layers=spec.num_layers,
        kv_channels=spec.head_dim,
        num_attention_heads=spec.num_kv_heads,
        max_sequence_length=length,
        buffer_size_gb=config.buffer_size_gb,
        paused_buffer_size_gb=config.paused_buffer_size_gb,
        block_count=block_count,
        max_requests=config.max_requests,
        slot_count=slot_count or config.max_requests * (config.effective_depth + 1),
        max_tokens=config.max_tokens,
        block_size_tokens=config.block_size_tokens,
        num_cuda_graphs=config.num_cuda_graphs,
        batch_invariant=config.batch_invariant,
        num_speculative_tokens=config.num_speculative_tokens,
        further_token_bytes=further,
        cache_mla_latent=spec.latent_rank is not None,
        releasable=config.enable_sleep_mode,
        device=device,
    )
    _log_cache(context, spec, further)
    return context


def kv_cache_specs(wrapper: Any, config: EngineConfig) -> tuple[KVCacheSpec, KVCacheSpec | None]:
    """What a token takes in the KV cache, without layers that do not draft, and in the cache of a
    model that drafts."""
    spec: KVCacheSpec = wrapper.kv_cache_spec
    if layers_draft(wrapper, config):
        return spec, None
    draft_model = getattr(wrapper, "draft_model", None)
    if draft_model is None or not config.num_speculative_tokens:
        return spec.decoder, None
    return spec.decoder, draft_model.kv_cache_spec.decoder


def _log_cache(context: DynamicInferenceContext, spec: KVCacheSpec, further: int) -> None:
    """``further``: bytes that a token takes in the cache of a model that drafts."""
    slots = (context.block_count + 1) * context.block_size_tokens
    logger.info(
        "the KV cache takes %.3f GiB: %d blocks of %d tokens in %d layers, %d of them of "
        "multi-token prediction%s",
        (spec.token_bytes + further) * slots / GIB,
        context.block_count,
        context.block_size_tokens,
        spec.num_layers,
        spec.num_mtp_layers,
        f"; {further * slots / GIB:.3f} GiB are the draft model's" if further else "",
    )


def keep_states(wrapper: Any, config: EngineConfig, context: DynamicInferenceContext) -> None:
    """Have room in a context for the state of a wrapped model's recurrent layers, if it has any.

    Raises:
        ConfigError: the model that drafts has recurrent layers.
        CacheTooLargeError: the states do not fit into the device's memory.
    """
    draft_model = getattr(wrapper, "draft_model", None)
    if getattr(draft_model, "recurrent_state_spec", None) is not None:
        raise ConfigError(
            "draft_model has recurrent layers, whose state nobody takes back behind wrong drafts; "
            "give one that has attention layers alone, or speculative_method='ngram'"
        )
    spec: RecurrentStateSpec | None = getattr(wrapper, "recurrent_state_spec", None)
    if spec is None or context.attached:
        return
    dtype = config.recurrent_state_dtype
    spec = spec.with_dtype(None if dtype is None else getattr(torch, dtype))
    count = config.state_snapshot_count
    if count is None:
        affordable = int(DEFAULT_SNAPSHOT_GIB[context.device.type] * GIB) // spec.state_bytes
        count = max(1, min(SNAPSHOTS_PER_REQUEST * context.max_requests, affordable))
    states = context.keep_states(spec, count if config.enable_prefix_caching else 0)
    logger.info(
        "recurrent state takes %.3f GiB: %d slots, %.3f MiB each in %d layers; %.3f GiB more are "
        "for %d snapshots of it, from which common prefixes go on",
        states.state_bytes / GIB,
        context.slot_count,
        states.state_bytes / (context.slot_count + 1) / 2**20,
        spec.num_layers,
        states.snapshot_bytes / GIB,
        states.snapshot_count,
    )
