"""Describes norms, weights, activations and the output layer as the fused kernels take them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import (
    GELU,
    GELU_TANH,
    LAYER_NORM,
    RMS_NORM,
    SILU_GATE,
    SQUARED_RELU,
    STAGE_K,
    takes_scales,
)
from megatron_async.models.fused.blocks.residual import Norm
from megatron_async.models.layers import activation

_NORMS = {"RMSNorm": RMS_NORM, "LayerNorm": LAYER_NORM, "FusedLayerNorm": LAYER_NORM}
_NORM_HOMES = ("megatron_async", "torch", "transformer_engine", "megatron")


def norm_of(norm: Any) -> Norm:
    """A norm as the GEMM that computes it takes it; :func:`norm_kind` must know it."""
    kind = norm_kind(norm)
    assert kind is not None
    return Norm(kind, norm.weight, getattr(norm, "bias", None), norm.eps)


def norm_kind(norm: Any) -> int | None:
    """``RMS_NORM`` or ``LAYER_NORM`` for a norm that multiplies by its weight; else None."""
    home = type(norm).__module__.partition(".")[0]
    if home not in _NORM_HOMES or getattr(norm, "zero_centered_gamma", False):
        return None
    if getattr(norm, "weight", None) is None or getattr(norm, "eps", None) is None:
        return None
    return _NORMS.get(type(norm).__name__)


def scale_of(linear: Any) -> Tensor | None:
    """The scales of a linear layer's e4m3 weight, fp32 ``[n, groups]``; None for other weights."""
    if linear.weight.dtype != torch.float8_e4m3fn:
        return None
    scale: Tensor = linear.weight_scale
    return scale


def e4m3_why_not(linear: Any) -> str | None:
    """Why the kernels do not take a linear layer's e4m3 weight and its scales."""
    scale, (n, k) = getattr(linear, "weight_scale", None), linear.weight.shape
    if not linear.weight.is_contiguous() or linear.weight.data_ptr() % 16:
        return "its e4m3 weight is not contiguous, from a multiple of 16 bytes on"
    if not isinstance(scale, Tensor):
        return "its e4m3 weight has no scales"
    if scale.dtype != torch.float32 or not scale.is_contiguous() or scale.data_ptr() % 16:
        return "the scales of its e4m3 weight are not contiguous float32"
    if k % STAGE_K:
        return f"an e4m3 weight of {n} x {k} is not covered"
    groups = scale.shape[-1]
    if scale.shape != (n, groups) or groups == 0 or k % groups or not takes_scales(k, k // groups):
        return f"scales {tuple(scale.shape)} of an e4m3 weight of {n} x {k} are not covered"
    return None


def output_weight(model: Any) -> Tensor:
    """What the output layer multiplies by, ``[vocab, hidden size]``; the embedding's where tied."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


def epilogue_of(mlp: Any, config: Any) -> int | None:
    """Which epilogue of the first GEMM is the MLP's activation; None if none is."""
    own: dict[Any, int] = {
        activation.SwiGLU: SILU_GATE,
        activation.GELU: GELU,
        activation.GELUTanh: GELU_TANH,
        activation.SquaredReLU: SQUARED_RELU,
    }
    function = getattr(mlp, "activation_func", None)
    if type(function) in own:
        return own[type(function)]
    if getattr(config, "use_te_activation_func", False):
        return None
    if config.gated_linear_unit:
        return SILU_GATE if function is F.silu else None
    if function is not F.gelu:
        return None
    # megatron fuses the bias with the tanh approximation.
    return GELU_TANH if config.bias_activation_fusion else GELU
