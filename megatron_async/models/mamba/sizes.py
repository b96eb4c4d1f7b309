"""Sizes of Mamba-2 layers, and what a hybrid pattern may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async.errors import CheckpointError
from megatron_async.models.description.config_protocol import ConfigFields

if TYPE_CHECKING:
    from megatron_async.kernels.mamba.layer import MambaSizes

MAMBA, ATTENTION, MLP, EXPERTS = LETTERS = "M*-E"
"""megatron-core's letters of the kinds of layers."""


def mamba_sizes(config: ConfigFields) -> MambaSizes:
    """Sizes of the Mamba-2 layers of a configuration."""
    from megatron_async.kernels.mamba.layer import MambaSizes

    return MambaSizes(
        heads=config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim,
        head_dim=config.mamba_head_dim,
        groups=config.mamba_num_groups,
        state_size=config.mamba_state_dim,
        conv_width=config.mamba_conv_kernel,
    )


def check_hybrid(config: ConfigFields) -> None:
    """Raises CheckpointError for a ``hybrid_override_pattern`` that contradicts other fields."""
    pattern = config.hybrid_override_pattern
    assert pattern is not None
    if len(pattern) != config.num_layers or set(pattern) - set(LETTERS):
        raise CheckpointError(
            f"model config: hybrid_override_pattern={pattern!r} must have one of {LETTERS} for "
            f"each of num_layers={config.num_layers} layers"
        )
    for name in ("norm_placement", "parallel_residual", "mtp_num_layers"):
        value, plain = getattr(config, name), {"norm_placement": "pre"}.get(name)
        if value and value != plain:
            raise CheckpointError(
                f"model config: {name}={value!r} is not supported with a hybrid_override_pattern"
            )
    if EXPERTS in pattern and config.num_moe_experts is None:
        raise CheckpointError(
            f"model config: hybrid_override_pattern={pattern!r} with {EXPERTS!r} needs "
            "num_moe_experts"
        )
    if config.moe_layer_freq is not None:
        raise CheckpointError(
            "model config: moe_layer_freq and hybrid_override_pattern exclude each other; the "
            f"pattern has {EXPERTS!r} for layers of experts"
        )
    if MAMBA not in pattern:
        return
    if config.mamba_num_heads is None and 2 * config.hidden_size % config.mamba_head_dim:
        raise CheckpointError(
            f"model config: mamba_head_dim={config.mamba_head_dim} must divide twice the "
            f"hidden_size={config.hidden_size}, or give mamba_num_heads"
        )
    if mamba_sizes(config).heads % config.mamba_num_groups:
        raise CheckpointError(
            f"model config: mamba_num_groups={config.mamba_num_groups} must divide the "
            f"{mamba_sizes(config).heads} heads of a Mamba layer"
        )
