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

LEAST_CAPABILITY = (8, 9)
"""The least of a GPU whose tensor cores multiply e4m3: Ada, Hopper and later."""


def quantize_activations(model: Module, static: Mapping[str, Tensor] | None = None) -> None:
    """From now on each linear layer of ``model`` that keeps e4m3 quantizes its input, but for those
    of experts.

    Args:
        static: fp32 ``[1]``, the scale of a layer's inputs, by its name. None chooses scales
            by token.

    Raises:
        ConfigError: no layer keeps e4m3, or the GPU does not multiply it.
    """
    layers = linears_in_e4m3(model)
    if not layers:
        raise ConfigError(
            "quantize_activations=True: no linear layer of the model keeps e4m3; leave it out"
        )
    device = next(iter(layers.values())).weight.device
    check_device(device)
    for name, layer in layers.items():
        layer.quantizes_input = True
        if static is not None:
            layer.input_scale = static[name].to(device, torch.float32).reshape(1)
    if device.type == "cuda" and HAS_TRITON:
        from megatron_async.models.quantized.feeds import link

        link(model)


def linears_in_e4m3(model: Module) -> dict[str, Any]:
    """The linear layers that keep e4m3, by name, without those of experts."""
    return {name: layer for name, layer in quantized(model).items() if is_one_linear(layer)}


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
