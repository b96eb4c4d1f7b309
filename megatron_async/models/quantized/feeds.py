"""Which linear layer each norm and activation of a model quantizes for (``fused_inputs.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.kernels.gemm import e4m3_inputs
from megatron_async.models.layers.activation import SwiGLU
from megatron_async.models.layers.norm import AllHeads, Norm

from megatron.core.transformer.mlp import MLP  # isort: skip

FEEDS = "feeds"
"""The attribute of a norm or an activation that is the layer it quantizes for."""
LINEARS = ("linear_qkv", "linear_q_proj", "in_proj", "linear_fc1")
"""Layers that read a norm, in the module behind it."""
NORMED = (
    ("input_layernorm", "self_attention"),
    ("pre_mlp_layernorm", "mlp"),
    ("norm", "mixer"),
)  # fmt: skip
"""Norms of layers, and the modules that read them."""


def link(model: Module) -> None:
    """From now on norms and activations of ``model`` quantize for the layers behind them, where
    these quantize their inputs and kernels take their rows."""
    for module in model.modules():
        for name, reader in NORMED:
            norm, behind = getattr(module, name, None), getattr(module, reader, None)
            linears = (getattr(behind, each, None) for each in LINEARS)
            linear = next((each for each in linears if each is not None), None)
            if isinstance(norm, Norm) and not isinstance(norm, AllHeads) and _takes(linear):
                vars(norm)[FEEDS] = linear  # not a submodule of the norm
        if _hands_on_its_activation(module) and _takes(module.linear_fc2):
            vars(module.activation_func)[FEEDS] = module.linear_fc2


def _hands_on_its_activation(module: Any) -> bool:
    """Whether a module calls a SwiGLU and gives what it returns to its second layer alone."""
    if type(module) is not MLP or type(module.activation_func) is not SwiGLU:
        return False
    return bool(module.config.use_te_activation_func)


def _takes(linear: Any) -> bool:
    if not getattr(linear, "quantizes_input", False):
        return False
    columns, groups = linear.weight.shape[1], linear.weight_scale.shape[1]
    return e4m3_inputs.takes(columns, groups, torch.bfloat16)
