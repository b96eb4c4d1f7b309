"""From a path, or a model that is there, to what an engine is built from."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.checkpoint import Pretrained, load_pretrained
from megatron_async.checkpoint.path import model_directory
from megatron_async.config import EngineConfig, check_config
from megatron_async.engine.build import build_context, resolve_device
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.models.config import ModelConfig
from megatron_async.models.wrapper import GPTInferenceWrapper
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.controller import TextGenerationController

if TYPE_CHECKING:
    from megatron_async.ranks.group import RankGroup


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
        from megatron_async.ranks.messages import LoadModel
        from megatron_async.ranks.start import device_of_rank

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
    weights = None
    if config.enable_sleep_mode:
        from megatron_async.models.releasable_weights import move_parameters

        weights = move_parameters(pretrained.model)
    wrapper = GPTInferenceWrapper(pretrained.model, batch_invariant=config.batch_invariant)
    wrapper.weights_region = weights
    if config.generation_config:
        from megatron_async.checkpoint.generation_config import sampling_defaults

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


def start_ranks(config: EngineConfig) -> RankGroup | None:
    """The group that a configuration asks for, of which this process is rank 0; None for one rank.

    Raises:
        ConfigError: the configuration does not suit a group, or the machine.
    """
    layout = Layout.of(config)
    check_supported(layout, config)
    if layout.world_size == 1:
        return None
    from megatron_async.ranks.start import start_group

    device = resolve_device(config.device).type
    return start_group(layout, device, config.rank_timeout_seconds)


def shared_config(config: EngineConfig, **values: Any) -> dict[str, Any]:
    """Fields for the other ranks, each of which has a device of its own, and records nothing."""
    fields = dataclasses.asdict(dataclasses.replace(config, record=None, **values))
    device = fields["device"]
    return {**fields, "device": None if device is None else torch.device(device).type}
