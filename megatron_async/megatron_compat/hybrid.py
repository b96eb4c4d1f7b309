"""Patterns and mixers of hybrid models."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["mixer_convolution", "pattern_from_ratios"]


def pattern_from_ratios(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """A letter for each layer, as megatron-core divides ``num_layers`` by these shares.

    0.16 has ``allocate_layers``, later releases ``pattern_from_ratios``, in another module since
    0.18.
    """
    allocate: Any
    try:
        from megatron.core.models.hybrid.hybrid_layer_allocation import pattern_from_ratios
    except ImportError:
        from megatron.core.ssm import mamba_hybrid_layer_allocation as module

        allocate = getattr(module, "pattern_from_ratios", None) or module.allocate_layers
    else:
        allocate = pattern_from_ratios
    return "".join(allocate(num_layers, attention_ratio, mlp_ratio))


def mixer_convolution(mixer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a ``MambaMixer``'s convolution, which are parameters of the mixer itself
    since 0.19, and of a ``conv1d`` until 0.18."""
    convolution = getattr(mixer, "conv1d", None)
    if convolution is not None:
        return convolution.weight, convolution.bias
    return mixer.conv1d_weight, mixer.conv1d_bias
