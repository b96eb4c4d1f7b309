"""The layers of a model whose choice of experts is handed out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_async.errors import ConfigError
from megatron_async.models.moe.adapt import AdaptedMoELayer
from megatron_async.models.moe.layer import MoELayer
from megatron_async.models.network import Network


class RoutedLayers(NamedTuple):
    """Layers of experts in the model's order, without those that draft, and what all of them
    have.

    Args:
        numbers: places of these layers among all ``num_layers`` of the model.
    """

    layers: tuple[Any, ...]
    num_experts: int
    top_k: int
    numbers: tuple[int, ...]
    num_layers: int


def expert_layers(model: torch.nn.Module) -> list[Any]:
    """The layers of experts of a model that is served, in its order."""
    return [each for each in model.modules() if isinstance(each, (MoELayer, AdaptedMoELayer))]


def decoder_layers(
    model: torch.nn.Module, kinds: tuple[type, ...] = (MoELayer, AdaptedMoELayer)
) -> list[Any]:
    """The layers of experts without those of multi-token prediction."""
    named = model.named_modules()
    return [m for name, m in named if isinstance(m, kinds) and not name.startswith("mtp.")]


def routed_layers(network: Network) -> RoutedLayers:
    """The layers of a network whose choice an engine hands out.

    Raises:
        ConfigError: it has none, or this process does not know what all of them choose.
    """
    layers = network.expert_layers()
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
    if layout is not None and layout.expert > 1 and "cuda" in str(network.device):
        raise ConfigError(
            "return_routed_experts=True is not supported with "
            f"expert_model_parallel_size={layout.expert} on a GPU, whose kernels keep the experts "
            "of one rank alone: use tensor_model_parallel_size"
        )
    settings = layers[0].settings
    names = {id(module): name for name, module in network.weights_owner.named_modules()}
    numbers = tuple(int(names[id(layer)].split("layers.")[1].split(".")[0]) for layer in layers)
    total = network.weights_owner.config.num_layers
    return RoutedLayers(tuple(layers), settings.num_experts, settings.top_k, numbers, total)
