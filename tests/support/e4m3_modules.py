"""Linear layers with weights in e4m3, made by hand from those that a model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MOST = 448.0
"""The largest number in e4m3."""


def round_to_e4m3(weight: Tensor, columns: int, *, powers: bool = False) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn ``[n, k]``, and fp32 scales ``[n, k / columns]`` with which each block of a
    row fills the range; powers of two if so asked for, so that products are bfloat16."""
    blocks = weight.float().unflatten(1, (-1, columns))
    scale = blocks.abs().amax(2) / MOST
    if powers:
        scale = torch.exp2(scale.log2().ceil())
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(1), scale


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    """float64 ``[n, k]``: e4m3 weights times their scales."""
    blocks = weight.double().unflatten(1, (scale.shape[1], -1))
    return (blocks * scale.double()[..., None]).flatten(1)


def round_in_place(linear: Any, columns: int) -> None:
    """Leave a linear layer's weight in bfloat16, as numbers that :func:`make_e4m3` with ``powers``
    keeps."""
    linear.weight.data.copy_(widened(*round_to_e4m3(linear.weight.data, columns, powers=True)))


def make_e4m3(linear: Any, columns: int = 0, *, powers: bool = False) -> None:
    """Round a linear layer's weight, with a scale for ``columns``; 0 for whole rows."""
    weight = linear.weight.detach()
    rounded, scale = round_to_e4m3(weight, columns or weight.shape[1], powers=powers)
    del linear.weight
    linear.weight = Parameter(rounded, requires_grad=False)
    linear.weight_scale = Parameter(scale, requires_grad=False)


def linears_of(layer: Any) -> dict[str, Any]:
    """The linear layers of a transformer layer, by role."""
    attention, mlp = layer.self_attention, layer.mlp
    return {
        "qkv": attention.linear_qkv, "projection": attention.linear_proj,
        "fc1": mlp.linear_fc1, "fc2": mlp.linear_fc2,
    }  # fmt: skip


def make_layers_e4m3(model: Any, columns: Mapping[str, int]) -> None:
    """Round those weights of all layers whose role has its ``columns``."""
    for layer in model.decoder.layers:
        for role, linear in linears_of(layer).items():
            if role in columns:
                make_e4m3(linear, columns[role])


def widened_state(model: Any) -> dict[str, Tensor]:
    """The parameters of a model as they are meant, e4m3 weights times their scales."""
    state = dict(model.named_parameters())
    scales = {name: state.pop(name) for name in list(state) if name.endswith(".weight_scale")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        state[weight] = widened(state[weight], scale)
    return {name: value.detach().clone() for name, value in state.items()}
