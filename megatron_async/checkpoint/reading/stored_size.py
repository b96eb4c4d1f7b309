"""What a model's configuration says against what its weights hold, before memory is spent on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_async.errors import CheckpointError, shown
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, MAMBA, MLP

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "mtp_num_layers",
)
SLACK = 2
"""A model of up to this many times what is stored is built: its error then names a tensor."""


def least_parameters(config: ModelConfig) -> int:
    """Elements of the large matrices that each architecture has: fewer than all."""
    attention = 2 * (config.num_attention_heads + config.num_kv_heads) * config.head_dim
    if config.latent_attention is not None:
        latent = config.latent_attention
        attention = config.num_attention_heads * latent.v_head_dim + latent.cached
    if config.hybrid_override_pattern is not None:
        return config.hidden_size * config.vocab_size + _least_of_parts(config, attention)
    expert_layers = config.expert_layer_count
    if config.has_experts(config.num_layers):
        expert_layers += config.mtp_num_layers
    all_layers = config.num_layers + config.mtp_num_layers
    layers = all_layers * config.hidden_size * attention
    layers += (all_layers - expert_layers) * 2 * config.hidden_size * config.ffn_hidden_size
    if config.num_moe_experts is not None:
        size, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size or 0
        layers += expert_layers * config.num_moe_experts * 2 * size * ffn
    embedded = config.vocab_size
    if config.position_embedding == "learned_absolute":
        embedded += config.max_sequence_length
    return config.hidden_size * embedded + layers


def _least_of_parts(config: ModelConfig, attention: int) -> int:
    """Return the fewest elements of a hybrid model's layers; ``attention`` rows of the hidden size
    are those of one attention layer."""
    found = len(config.layers_of(ATTENTION)) * attention
    found += len(config.layers_of(MLP)) * 2 * config.ffn_hidden_size
    found += len(config.layers_of(MAMBA)) * (config.mamba.projection + config.mamba.inner)
    found *= config.hidden_size
    size, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size or 0
    return found + len(config.layers_of(EXPERTS)) * (config.num_moe_experts or 0) * 2 * size * ffn


def check_stored_size(
    directory: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that weights of ``shapes`` may be those of ``config``, by their number alone.

    Raises:
        CheckpointError: the configuration describes a model far larger than what is stored.
    """
    stored = sum(map(math.prod, shapes.values()))
    least = least_parameters(config)
    if least > SLACK * stored:
        sizes = [f"{name}={getattr(config, name)}" for name in _SIZES]
        if config.num_moe_experts is not None:
            names = ("num_moe_experts", "moe_ffn_hidden_size")
            sizes += [f"{name}={getattr(config, name)}" for name in names]
        if config.hybrid_override_pattern is not None:
            hybrid = ("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim")
            sizes += [f"{name}={shown(getattr(config, name), 80)}" for name in hybrid]
        if config.position_embedding == "learned_absolute":
            sizes.append(f"max_sequence_length={config.max_sequence_length}")
        raise CheckpointError(
            f"{directory}: the configuration describes a model of at least {least:,} parameters "
            f"({', '.join(sizes)}), and the weights have {stored:,}"
        )
    most_layers = _most_layers(shapes.items())
    if config.num_layers > most_layers:
        raise CheckpointError(
            f"{directory}: num_layers={config.num_layers}, and the weights have tensors for "
            f"{most_layers} layers at most"
        )


def _most_layers(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Layers that tensors can be for: each has one at least, or its part of a stacked one."""
    alone = stacked = 0
    for name, shape in shapes:
        alone += 1
        if name.startswith("decoder.layers.") and shape:
            stacked = max(stacked, shape[0])
    return max(alone, stacked)
