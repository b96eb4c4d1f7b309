"""Layers that keep their weights as MXFP4: ``weight`` uint8 ``[experts, n, k / 2]`` and
``weight_scale`` uint8 ``[experts, n, k / 32]``, see ``kernels/moe/mxfp4.py``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_async.kernels.moe.mxfp4 import BLOCK, pack, unpack
from megatron_async.models.quantized.values import PACKED, is_packed

HAS_TRITON = importlib.util.find_spec("triton") is not None
SCALE_DTYPE = torch.float8_e8m0fnu
"""What the bytes of scales stand for."""


def multiply_out(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What a packed weight stands for: exact products, rounded to ``dtype`` once."""
    if weight.is_cuda and HAS_TRITON:
        from megatron_async.kernels.moe import mxfp4_triton

        return mxfp4_triton.multiply_out(weight, scale, dtype)
    return unpack(weight, scale).to(dtype)


def scales_at(view: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The view of ``scale`` that has the scales of ``view``, whole rows of packed ``weight``, one
    after the other."""
    row = (view.data_ptr() - weight.data_ptr()) // weight.shape[-1]
    count = view.shape[:-1].numel()
    return scale.flatten(0, -2)[row : row + count].view(*view.shape[:-1], scale.shape[-1])


def keep(layer: Any) -> None:
    """Give a layer memory for a packed weight of its rows' size, see ``linear.keep``."""
    *lead, k = layer.weight.shape
    with torch.inference_mode(False):
        numbers, scale = (
            torch.zeros(*lead, k // size, dtype=PACKED, device=layer.weights_device)
            for size in (2, BLOCK)
        )
        _take(layer, numbers, scale)


def pack_in_place(layer: Any) -> None:
    """Keep the weight that a layer has as MXFP4."""
    with torch.no_grad():
        experts = [pack(expert) for expert in layer.weight.detach()]
        numbers, scales = (torch.stack(parts) for parts in zip(*experts, strict=True))
        _take(layer, numbers, scales)


def _take(layer: Any, numbers: Tensor, scale: Tensor) -> None:
    weight = Parameter(numbers, requires_grad=False)
    vars(weight).update(vars(layer.weight))  # what megatron says of it
    layer.weight = weight
    layer.register_buffer("weight_scale", scale)


def packed_layers(model: Module) -> dict[str, Any]:
    """The layers that keep MXFP4, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if "weight_scale" in layer._buffers and is_packed(layer.weight)
    }


def scales_of(model: Module) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Names and scales of these layers, and the dtype that these are of, for ``check_finite``."""
    for name, layer in packed_layers(model).items():
        yield f"{name}.weight_scale", layer.weight_scale, SCALE_DTYPE
