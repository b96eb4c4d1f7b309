"""Which layers of a model quantize their inputs (``quantize_activations``, see ``inputs.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_async.errors import ConfigError
from megatron_async.models.quantized.inputs import HAS_TRITON
from megatron_async.models.quantized.linear import is_one_linear, quantized
from megatron_async.models.quantized.values import E4M3

LEAST_COLUMNS = 32
"""That share a scale, of experts that quantize their inputs: a step of their products."""
LEAST_CAPABILITY = (8, 9)
"""The least of a GPU whose tensor cores multiply e4m3: Ada, Hopper and later."""


def quantize_activations(model: Module, static: Mapping[str, Tensor] | None = None) -> None:
    """From now on each linear layer of ``model`` that keeps e4m3 quantizes its input, and so do
    experts both of whose layers keep it, whose scales are by token in any case.

    Args:
        static: fp32 ``[1]``, the scale of a layer's inputs, by its name. None chooses scales
            by token.

    Raises:
        ConfigError: no layer keeps e4m3, or the GPU does not multiply it.
    """
    layers, experts = linears_in_e4m3(model), experts_in_e4m3(model)
    if not layers and not experts:
        raise ConfigError(
            "quantize_activations=True: no linear layer of the model keeps e4m3; leave it out"
        )
    device = next(iter([*layers.values(), *experts])).weight.device
    check_device(device)
    for each in experts:
        each.quantizes_input = True
    for name, layer in layers.items():
        layer.quantizes_input = True
        if static is not None:
            layer.input_scale = static[name].to(device, torch.float32).reshape(1)
    if device.type == "cuda" and HAS_TRITON:
        from megatron_async.models.quantized.feeds import link

        link(model)
        with torch.inference_mode(False):
            unit = torch.ones((), device=device)
        for layer in layers.values():
            layer.unit_scale = unit


def linears_in_e4m3(model: Module) -> dict[str, Any]:
    """The linear layers that keep e4m3, by name, without those of experts."""
    return {name: layer for name, layer in quantized(model).items() if is_one_linear(layer)}


def experts_in_e4m3(model: Module) -> list[Any]:
    """The linear layers of experts, where both keep e4m3 whose groups the kernels multiply."""
    found = []
    for module in model.modules():
        pair = [getattr(module, name, None) for name in ("linear_fc1", "linear_fc2")]
        if all(each is not None and _is_of_experts(each) for each in pair):
            found += pair
    return found


def _is_of_experts(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    if weight is None or weight.dtype != E4M3 or weight.dim() != 3:
        return False
    columns: int = weight.shape[-1] // layer.weight_scale.shape[-1]
    return columns == weight.shape[-1] or columns % LEAST_COLUMNS == 0


def has_quantized_activations(model: Any) -> bool:
    """Whether layers of ``model`` quantize their inputs."""
    return any(getattr(module, "quantizes_input", False) for module in model.modules())


def check_device(device: torch.device) -> None:
    """Raises ConfigError for a GPU whose tensor cores do not multiply e4m3."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        raise ConfigError(
            f"quantize_activations=True needs a GPU of compute capability 8.9 or more, and this "
            f"one has {found[0]}.{found[1]}: leave it out"
        )
