"""Sizes of Mamba-2 layers, and what a hybrid pattern may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megatron_async.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_async.models.config import ModelConfig

MAMBA, ATTENTION, MLP, EXPERTS = LETTERS = "M*-E"
"""megatron-core's letters of the kinds of layers."""


class MambaSizes(NamedTuple):
    """Of a Mamba-2 mixer: ``heads`` of ``head_dim`` channels, each with a state ``[head_dim,
    state_dim]``; ``groups`` of heads share their B and C."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int

    @classmethod
    def of(cls, config: ModelConfig) -> MambaSizes:
        """Those that a configuration asks for."""
        heads = config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim
        return cls(
            heads,
            config.mamba_head_dim,
            config.mamba_num_groups,
            config.mamba_state_dim,
            config.mamba_conv_kernel,
        )

    @property
    def inner(self) -> int:
        """Channels of x, and of the gate z."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> int:
        """Channels of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def projection(self) -> int:
        """Rows of ``in_proj``: z, x, B, C, dt."""
        return self.inner + self.conv + self.heads


def check_hybrid(config: ModelConfig) -> None:
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
    if MAMBA not in pattern:
        return
    if config.mamba_num_heads is None and 2 * config.hidden_size % config.mamba_head_dim:
        raise CheckpointError(
            f"model config: mamba_head_dim={config.mamba_head_dim} must divide twice the "
            f"hidden_size={config.hidden_size}, or give mamba_num_heads"
        )
    if config.mamba.heads % config.mamba_num_groups:
        raise CheckpointError(
            f"model config: mamba_num_groups={config.mamba_num_groups} must divide the "
            f"{config.mamba.heads} heads of a Mamba layer"
        )
