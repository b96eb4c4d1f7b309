"""Norms and activations on a GPU that quantize what they hand to a linear layer.

Each is linked with the layer behind it (:func:`link`). Its result carries e4m3 and scales for that
layer, ``result.quantized``, and no other reads them: a norm's result is the normed rows as ever; an
activation's, which nothing but the layer reads, is the numbers themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
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


class Quantized(NamedTuple):
    """What a tensor is for ``layer``: e4m3 ``numbers``, None for the tensor itself, with ``scale``;
    ``dtype`` is that of the rows."""

    layer: Any
    numbers: Tensor | None
    scale: Tensor
    dtype: torch.dtype


def link(model: Module) -> None:
    """From now on norms and activations of ``model`` quantize for the layers behind them, where
    these quantize their inputs and kernels take their rows. A hook sees results as they are."""
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


def add_norm(
    norm: Norm, linear: Any, x: Tensor, residual: Tensor | None, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :meth:`Norm.add`; the normed rows are quantized for ``linear``."""
    from megatron_async.kernels.norm.norm_inputs import add_norm_inputs

    hidden, normed, (numbers, scale) = add_norm_inputs(
        x, residual, norm.weight, norm.bias, norm.eps, x_bias, center=norm.center,
        offset=norm.offset, groups=linear.weight_scale.shape[1], static=linear.input_scale,
    )  # fmt: skip
    normed.quantized = Quantized(linear, numbers, scale, x.dtype)  # type: ignore[attr-defined]
    return hidden, normed


def swiglu(linear: Any, x: Tensor) -> Tensor:
    """E4m3 of ``x [..., 2F]``, quantized for ``linear``, that nobody else may read."""
    from megatron_async.kernels.norm.swiglu_inputs import swiglu_inputs

    numbers, scale = swiglu_inputs(x, linear.weight_scale.shape[1], linear.input_scale)
    numbers.quantized = Quantized(linear, None, scale, x.dtype)  # type: ignore[attr-defined]
    return numbers
