"""What an engine is built from, for a model directory and a configuration."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_async.checkpoint import Pretrained, load_pretrained
from megatron_async.checkpoint.generation_config import sampling_defaults
from megatron_async.checkpoint.path import model_directory
from megatron_async.config import EngineConfig, check_config, draft_windows
from megatron_async.device.memory import GIB
from megatron_async.drafting.choose import Drafting, layers_draft
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.config import ModelConfig
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.recurrent_state_spec import RecurrentStateSpec
from megatron_async.models.releasable_weights import move_parameters
from megatron_async.models.wrapper import GPTInferenceWrapper
from megatron_async.ranks.group import RankGroup, device_of_rank, start_group
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.ranks.messages import LoadModel
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.controller import TextGenerationController
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.runner.step_costs import measure_step_costs
from megatron_async.scheduler.draft_control import StepCosts
from megatron_async.scheduler.limits import Limits

logger = logging.getLogger(__name__)

DEFAULT_CACHE_GIB = {"cpu": 1.0, "cuda": 16.0}
DEFAULT_SNAPSHOT_GIB = {"cpu": 0.25, "cuda": 4.0}
SNAPSHOTS_PER_REQUEST = 4
CHUNKS_AT_ONCE = 4
"""Prefill chunks that fit into a forward next to full decode rows, unless its size is given."""


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


def limits_of(
    context: DynamicInferenceContext,
    config: EngineConfig,
    *,
    enable_chunked_prefill: bool,
    lookahead: int = 0,
    admit_tokens: bool = False,
    rotation_limit: int | None = None,
    attention_window: int | None = None,
) -> Limits:
    """The scheduler's limits; the context's sizes win over the configuration's.

    Args:
        lookahead: positions behind a window that get blocks with it.
        admit_tokens: admissions bring the tokens of their requests.
        rotation_limit: tokens up to which the model rotates a request in one way.
        attention_window: tokens that the layer with the largest window attends to; None where one
            has none.

    Raises:
        ConfigError: a chunk would not fit into a forward next to the decoding rows; drafts would
            cross ``rotation_limit``.
    """
    window = 1 + context.num_speculative_tokens
    if rotation_limit is not None and rotation_limit >= context.max_sequence_length:
        rotation_limit = None
    if rotation_limit is not None and window > 1:
        raise ConfigError(
            f"num_speculative_tokens={window - 1} needs a max_sequence_length of at most "
            f"{rotation_limit} with this model, whose rotary embeddings change there"
        )
    # No prompt is longer, so a larger chunk would only ask for memory.
    chunk = min(config.prefill_chunk_tokens, context.max_sequence_length)
    if not enable_chunked_prefill:
        chunk = context.max_sequence_length
    least = context.max_requests * window + chunk
    max_tokens = config.max_tokens if context.max_tokens is None else context.max_tokens
    if max_tokens is None:
        max_tokens = context.max_requests * window + CHUNKS_AT_ONCE * chunk
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    # Nor does a step hold more than a chunk, or a window of drafts, in each row.
    max_tokens = min(max_tokens, context.max_requests * max(chunk, window))
    per_row = 1 + -(-(window + lookahead) // context.block_size_tokens)
    return Limits(
        max_requests=context.max_requests,
        slot_count=context.slot_count,
        max_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        block_size=context.block_size_tokens,
        block_count=context.block_count,
        max_assignments=context.max_requests * per_row + 4 * context.max_blocks_per_request,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=draft_windows(window - 1, adaptive=config.adaptive_speculation),
        lookahead=lookahead,
        admit_tokens=admit_tokens,
        paused_block_count=context.paused_block_count,
        rotation_limit=rotation_limit,
        # Drafting writes behind the last token, and reads from there.
        attention_window=attention_window if window == 1 else None,
        state_snapshots=None if context.states is None else context.states.snapshot_count,
    )


def with_step_costs(
    config: EngineConfig, runner: ModelRunner, context: DynamicInferenceContext, limits: Limits
) -> EngineConfig:
    """A configuration with the costs of steps, measured if it needs and lacks them."""
    has_costs = config.speculative_step_costs is not None
    if not config.adaptive_speculation or limits.window == 1 or has_costs:
        return config
    costs = measure_step_costs(runner, runner.row_buckets, limits.windows, context.null_slot)
    for rows, window, seconds in costs:
        logger.info("a decode step of %d rows, window %d: %.3f ms", rows, window, 1e3 * seconds)
    return dataclasses.replace(config, speculative_step_costs=costs)


def step_costs_of(config: EngineConfig, limits: Limits) -> StepCosts | None:
    """What the scheduler is to know of the costs of steps; None to draft all."""
    if not config.adaptive_speculation or not config.speculative_step_costs:
        return None
    costs = {(rows, window): seconds for rows, window, seconds in config.speculative_step_costs}
    return StepCosts(costs, limits.windows)


def runner_options(config: EngineConfig, limits: Limits, drafting: Drafting) -> dict[str, Any]:
    """Arguments of the runner beside device, context and model: the same on all ranks."""
    return {
        "max_tokens": limits.max_tokens,
        "max_assignments": limits.max_assignments,
        "depth": config.effective_depth,
        "poison": config.debug,
        "extras": config.enable_sampling_extras,
        "capture_mixed": config.capture_mixed_steps,
        "make_drafter": drafting.make,
        "windows": limits.windows,
    }


def limits_for(
    wrapper: Any,
    context: DynamicInferenceContext,
    config: EngineConfig,
    drafting: Drafting,
    *,
    enable_chunked_prefill: bool,
) -> Limits:
    """:func:`limits_of` a wrapped model that drafts so."""
    return limits_of(
        context,
        config,
        enable_chunked_prefill=enable_chunked_prefill,
        lookahead=drafting.lookahead,
        admit_tokens=drafting.wants_tokens,
        rotation_limit=getattr(wrapper, "rotation_limit", None),
        attention_window=getattr(wrapper, "attention_window", None),
    )


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is built from. ``group`` are the ranks that were started for it."""

    controller: TextGenerationController
    context: DynamicInferenceContext
    eos_token_ids: tuple[int, ...] | None
    model_name: str
    group: RankGroup | None = None


def load_parts(path: str | Path, config: EngineConfig) -> EngineParts:
    """The parts of an engine for a model directory.

    Raises:
        CheckpointError: the directory is missing, corrupt or not supported.
        ConfigError: the configuration does not suit the model or the machine.
    """
    check_config(config)
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path={path!r} must be 'tiny' or the path of a model directory")
    group = start_ranks(config)
    if group is None:
        device = resolve_device(config.device)
    else:
        device = device_of_rank(resolve_device(config.device).type)
        group.tell(LoadModel(str(path), shared_config(config)))
    try:
        wrapper, pretrained = load_wrapper(path, config, device)
        if group is not None:
            group.await_answers()
            wrapper.rank_group = group
            group.model_path = str(path)
        return EngineParts(
            TextGenerationController(wrapper, pretrained.tokenizer),
            build_context(wrapper, config, device),
            pretrained.eos_token_ids,
            pretrained.name,
            group,
        )
    except BaseException:
        if group is not None:
            group.close()
        raise


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """The group that a configuration asks for, of which this process is rank 0; None for one rank.

    Raises:
        ConfigError: the configuration does not suit a group, or the machine.
    """
    layout = Layout.of(config)
    check_supported(layout, config)
    if layout.world_size == 1:
        return None
    device = resolve_device(config.device).type
    return start_group(layout, device, config.rank_timeout_seconds)


def shared_config(config: EngineConfig, **values: Any) -> dict[str, Any]:
    """Fields for the other ranks, each of which has a device of its own, and records nothing."""
    fields = dataclasses.asdict(dataclasses.replace(config, record=None, **values))
    device = fields["device"]
    return {**fields, "device": None if device is None else torch.device(device).type}


def load_wrapper(
    path: str | Path, config: EngineConfig, device: torch.device
) -> tuple[GPTInferenceWrapper, Pretrained]:
    """The model of a directory, or this rank's share of it, with the one that drafts."""
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    pretrained = load_pretrained(
        path,
        device=device,
        dtype=dtype,
        allow_non_finite_weights=config.allow_non_finite_weights,
        tokenizer_model=config.tokenizer_model,
    )
    weights = move_parameters(pretrained.model) if config.enable_sleep_mode else None
    wrapper = GPTInferenceWrapper(pretrained.model, batch_invariant=config.batch_invariant)
    wrapper.weights_region = weights
    if config.generation_config:
        wrapper.sampling_defaults = sampling_defaults(model_directory(path))
    if config.draft_model is not None:
        drafting = load_pretrained(
            config.draft_model,
            device=device,
            dtype=dtype or wrapper.kv_cache_spec.dtype,
            allow_non_finite_weights=config.allow_non_finite_weights,
        )
        wrapper.draft_model = GPTInferenceWrapper(
            drafting.model, batch_invariant=config.batch_invariant
        )
        check_same_vocabulary(pretrained.config, pretrained.tokenizer, drafting)
    return wrapper, pretrained


def check_same_vocabulary(config: ModelConfig, tokenizer: Any, drafting: Pretrained) -> None:
    """Raises ConfigError unless token ids mean the same to a model and to the one that drafts, as
    far as their tokenizers are known."""
    sizes = [config.vocab_size, drafting.config.vocab_size]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"draft_model has {sizes[1]} token ids and the model {sizes[0]}; both need the same "
            "vocabulary"
        )
    tokens = [each.vocabulary for each in (tokenizer, drafting.tokenizer) if each is not None]
    if any(each != tokens[0] for each in tokens):
        raise ConfigError("draft_model has another vocabulary than the model; both need the same")


def parts_over_same_weights(
    wrapper: Any,
    tokenizer: Any,
    config: EngineConfig,
    device: torch.device,
    eos_token_ids: tuple[int, ...] | None,
    model_name: str,
) -> EngineParts:
    """The parts of another engine over the weights of a wrapped model.

    Raises:
        ConfigError: the configuration names another device or dtype than the weights'.
    """
    check_config(config)
    if config.device is not None and resolve_device(config.device) != resolve_device(str(device)):
        raise ConfigError(
            f"device={config.device!r} but the weights are on {device}; leave it out, or load the "
            "model again"
        )
    dtype = wrapper.kv_cache_spec.dtype
    if config.dtype is not None and getattr(torch, config.dtype) != dtype:
        raise ConfigError(
            f"dtype={config.dtype!r} but the weights are {dtype}; leave it out, or load the model "
            "again"
        )
    if isinstance(wrapper, GPTInferenceWrapper):
        draft_model, defaults = wrapper.draft_model, wrapper.sampling_defaults
        group, weights = wrapper.rank_group, wrapper.weights_region
        wrapper = GPTInferenceWrapper(wrapper.model, batch_invariant=config.batch_invariant)
        wrapper.rank_group, wrapper.weights_region = group, weights
        if config.generation_config:
            if defaults is None:
                raise ConfigError(
                    "generation_config is read with the model; give it to from_pretrained"
                )
            wrapper.sampling_defaults = defaults
        if config.draft_model is not None:
            if draft_model is None:
                raise ConfigError(
                    "draft_model is loaded with the model; give it to from_pretrained"
                )
            wrapper.draft_model = GPTInferenceWrapper(
                draft_model.model, batch_invariant=config.batch_invariant
            )
    return EngineParts(
        TextGenerationController(wrapper, tokenizer),
        build_context(wrapper, config, device),
        eos_token_ids,
        model_name,
    )
