"""The layers of a model whose choice of experts is handed out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_async.errors import ConfigError
from megatron_async.models.moe.adapt import AdaptedMoELayer
from megatron_async.models.moe.layer import MoELayer


class RoutedLayers(NamedTuple):
    """Layers of experts in the model's order, without those that draft, and what all of them
    have."""

    layers: tuple[Any, ...]
    num_experts: int
    top_k: int


def expert_layers(model: torch.nn.Module) -> list[Any]:
    """The layers of experts of a model that is served, in its order."""
    return [each for each in model.modules() if isinstance(each, (MoELayer, AdaptedMoELayer))]


def decoder_layers(model: torch.nn.Module) -> list[Any]:
    """:func:`expert_layers` without those of multi-token prediction."""
    return without_drafting(model, expert_layers(model))


def without_drafting(model: torch.nn.Module, layers: list[Any]) -> list[Any]:
    """Those of ``layers`` that are not in a model's layers of multi-token prediction."""
    mtp = getattr(model, "mtp", None)
    drafting = set() if mtp is None else {id(each) for each in mtp.modules()}
    return [each for each in layers if id(each) not in drafting]


def routed_layers(network: Any) -> RoutedLayers:
    """The layers of a network whose choice an engine hands out.

    Raises:
        ConfigError: it has none, or this process does not know what all of them choose.
    """
    model = getattr(network, "model", None)
    layers = decoder_layers(model) if isinstance(model, torch.nn.Module) else []
    if not layers:
        raise ConfigError(
            "return_routed_experts=True needs a model with experts, and this one has none; leave "
            "it out"
        )
    layout = None if network.parallel is None else network.parallel.layout
    if layout is not None and layout.pipeline > 1:
        raise ConfigError(
            "return_routed_experts=True needs all layers on rank 0: leave "
            f"pipeline_model_parallel_size={layout.pipeline} out, and use "
            "tensor_model_parallel_size"
        )
    if layout is not None and layout.expert > 1 and network.device.type == "cuda":
        raise ConfigError(
            "return_routed_experts=True is not supported with "
            f"expert_model_parallel_size={layout.expert} on a GPU, whose kernels keep the experts "
            "of one rank alone: use tensor_model_parallel_size"
        )
    settings = layers[0].settings
    return RoutedLayers(tuple(layers), settings.num_experts, settings.top_k)
