"""Whether a model divides over ranks: what is asked before any is started."""

from __future__ import annotations

import dataclasses

from megatron_async.errors import ConfigError
from megatron_async.models.description.config import ModelConfig


def check_divides(config: ModelConfig, *, tensor: int, expert: int, pipeline: int) -> None:
    """Raises :class:`ConfigError` unless each rank can have a share of the model."""
    if tensor > 1:
        _check_tensor(config, tensor)
    if pipeline > 1:
        _check_stages(config, pipeline)
    _check_experts(config, expert, tensor)


def tensor_share(config: ModelConfig, ranks: int) -> ModelConfig:
    """A model of one rank whose layers have the shapes of a share of tensor parallelism.

    Raises:
        ConfigError: the model does not divide by ``ranks``.
    """
    if ranks > 1:
        check_divides(config, tensor=ranks, expert=1, pipeline=1)
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        ffn_hidden_size=config.ffn_hidden_size // ranks,
        vocab_size=config.vocab_size // ranks,
        moe_ffn_hidden_size=_share(config.moe_ffn_hidden_size, ranks),
        moe_shared_expert_intermediate_size=_share(
            config.moe_shared_expert_intermediate_size, ranks
        ),
    )


def _share(size: int | None, ranks: int) -> int | None:
    return None if size is None else size // ranks


def _check_tensor(config: ModelConfig, ranks: int) -> None:
    if config.hybrid_override_pattern is not None:
        raise ConfigError(
            "a model with a hybrid_override_pattern is not divided over tensor-parallel ranks: "
            "load it without tensor parallelism"
        )
    for name in ("num_attention_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"):
        if getattr(config, name) % ranks:
            raise ConfigError(
                f"{name}={getattr(config, name)} does not divide by the tensor parallel size "
                f"{ranks}: use a smaller one"
            )
    if config.qk_norm and config.qk_norm_kind in ("projection", "each_head"):
        raise ConfigError(
            f"qk_norm_kind={config.qk_norm_kind!r} needs all heads on each rank: load the model "
            "without tensor parallelism"
        )


def _check_experts(config: ModelConfig, ranks: int, tensor: int) -> None:
    name = f"expert_model_parallel_size={ranks}"
    if config.num_moe_experts is None:
        if ranks > 1:
            raise ConfigError(f"{name}, but the model has no experts; leave it out")
        return
    if config.num_moe_experts % ranks:
        raise ConfigError(
            f"num_moe_experts={config.num_moe_experts} does not divide by {name}: use a smaller one"
        )
    shared_size = "moe_shared_expert_intermediate_size"
    sizes = {shared_size: config.moe_shared_expert_intermediate_size}
    if ranks == 1:  # each expert is shared
        sizes["moe_ffn_hidden_size"] = config.moe_ffn_hidden_size
    for field, size in sizes.items():
        if size is not None and size % tensor:
            whole = (
                "" if field == shared_size else ", or expert_model_parallel_size for whole experts"
            )
            raise ConfigError(
                f"{field}={size} does not divide by the tensor parallel size {tensor}: use a "
                f"smaller one{whole}"
            )


def _check_stages(config: ModelConfig, stages: int) -> None:
    name = f"pipeline_model_parallel_size={stages}"
    if config.num_layers < stages:
        raise ConfigError(f"num_layers={config.num_layers} are too few for {name}: use a smaller")
    for field in ("hybrid_override_pattern", "latent_attention"):
        if getattr(config, field) is not None:
            raise ConfigError(f"a model with {field} has no stages: leave {name} out")
