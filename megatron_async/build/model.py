"""From a path, or a model that is there, to a model that is served."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron_async.build.ranks import config_of_ranks, start_ranks
from megatron_async.checkpoint import Pretrained, describe_pretrained, load_pretrained
from megatron_async.checkpoint.path import model_directory, random_shape
from megatron_async.config.engine_config import EngineConfig, check_config
from megatron_async.device import resolve_device
from megatron_async.errors import CheckpointError, ConfigError, shown
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.network import Network
from megatron_async.models.served import ServedModel


def load_model(path: str | Path, config: EngineConfig) -> ServedModel:
    """The model of a directory, on this process's device, and on all ranks that a configuration
    asks for: its ``group`` are these.

    Raises:
        CheckpointError: the directory is missing, corrupt or not supported.
        ConfigError: the configuration does not suit the model or the machine.
    """
    check_config(config)
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path={shown(path)} must be 'tiny' or the path of a model directory")
    given = (path,) if config.draft_model is None else (path, config.draft_model)
    group = start_ranks(config, lambda: map(config_of, given))
    device = resolve_device(config.device)
    if group is None:
        return load_share(path, config, device)
    try:
        from megatron_async.ranks.messages import LoadModel
        from megatron_async.ranks.start import device_of_rank

        group.tell(LoadModel(str(path), config_of_ranks(config)))
        model = load_share(path, config, device_of_rank(device.type))
        group.await_answers()
    except BaseException:
        group.close()
        raise
    group.model_path = str(path)
    return dataclasses.replace(model, group=group)


def config_of(path: str | Path) -> ModelConfig:
    """The architecture that a path names; no weights are read. Raises CheckpointError."""
    return random_shape(path) or describe_pretrained(path).config


def load_share(path: str | Path, config: EngineConfig, device: torch.device) -> ServedModel:
    """The model of a directory, or this rank's share of it, with the one that drafts."""
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    with _compiling_meanwhile(config, device) as built:
        pretrained = load_pretrained(
            path,
            device=device,
            dtype=dtype,
            allow_non_finite_weights=config.allow_non_finite_weights,
            tokenizer_model=config.tokenizer_model,
            quantization=config.quantization,
            quantize_activations=config.quantize_activations,
            built=built,
        )
    weights = None
    if config.enable_sleep_mode:
        from megatron_async.models.releasable_weights import move_parameters

        weights = move_parameters(pretrained.model)
    network = network_over(pretrained.model, config)
    defaults = None
    if config.generation_config:
        from megatron_async.checkpoint.huggingface.generation_config import sampling_defaults

        defaults = sampling_defaults(model_directory(path))
    draft = None
    if config.draft_model is not None:
        drafting = load_pretrained(
            config.draft_model,
            device=device,
            dtype=dtype or network.kv_cache_spec.dtype,
            allow_non_finite_weights=config.allow_non_finite_weights,
        )
        draft = network_over(drafting.model, config)
        check_same_vocabulary(pretrained.config, pretrained.tokenizer, drafting)
    return ServedModel(
        network=network,
        tokenizer=pretrained.tokenizer,
        name=pretrained.name,
        eos_token_ids=pretrained.eos_token_ids,
        draft=draft,
        weights_region=weights,
        sampling_defaults=defaults,
    )


def _compiling_meanwhile(
    config: EngineConfig, device: torch.device
) -> AbstractContextManager[Callable[[Any], None] | None]:
    if device.type != "cuda":
        return nullcontext()
    from megatron_async.build.kernels import compiling_meanwhile

    return compiling_meanwhile(config, device)


def network_over(model: Any, config: EngineConfig) -> GPTNetwork:
    """What runs a model of megatron-core in engines of a configuration."""
    return GPTNetwork(
        model,
        batch_invariant=config.batch_invariant,
        kv_cache_dtype=None if config.kv_cache_dtype is None else torch.float8_e4m3fn,
    )


def for_config(model: ServedModel, config: EngineConfig) -> ServedModel:
    """The same weights for another configuration."""

    def over(network: Network) -> Network:
        return network_over(network.model, config) if isinstance(network, GPTNetwork) else network

    draft = None if config.draft_model is None else model.draft
    return dataclasses.replace(
        model,
        network=over(model.network),
        draft=None if draft is None else over(draft),
        sampling_defaults=model.sampling_defaults if config.generation_config else None,
    )


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


def over_same_weights(
    model: ServedModel, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> ServedModel:
    """A model that is served for another engine over its weights.

    Args:
        device, dtype: of the weights.

    Raises:
        ConfigError: the configuration names another device or dtype, or asks for something that
            was not loaded with the model.
    """
    check_config(config)
    if config.device is not None and resolve_device(config.device) != resolve_device(str(device)):
        raise ConfigError(
            f"device={config.device!r} but the weights are on {device}; leave it out, or load the "
            "model again"
        )
    if config.dtype is not None and getattr(torch, config.dtype) != dtype:
        raise ConfigError(
            f"dtype={config.dtype!r} but the weights are {dtype}; leave it out, or load the model "
            "again"
        )
    if isinstance(model.network, GPTNetwork):
        if config.generation_config and model.sampling_defaults is None:
            raise ConfigError(
                "generation_config is read with the model; give it to from_pretrained"
            )
        if config.draft_model is not None and model.draft is None:
            raise ConfigError("draft_model is loaded with the model; give it to from_pretrained")
    return for_config(model, config)
