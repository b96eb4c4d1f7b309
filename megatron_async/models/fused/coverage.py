"""Which models the fused decode forward computes (``fused_decode.py``), and as what it takes parts.

It reads a model's parameters and leaves its modules' ``forward`` aside. So whatever it does not
know to be what it computes has a reason here, and such a model decodes with its own forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_config import (
    GELU,
    GELU_TANH,
    LAYER_NORM,
    RMS_NORM,
    SILU_GATE,
    STAGE_K,
)
from megatron_async.models import activation
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.spec import (
    BiasedColumnParallelLinear,
    BiasedRowParallelLinear,
    DecoderLayer,
)

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.models.common.embeddings.language_model_embedding import (  # isort: skip
    LanguageModelEmbedding,
)
from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlock  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

_LINEARS = (
    ColumnParallelLinear,
    RowParallelLinear,
    BiasedColumnParallelLinear,
    BiasedRowParallelLinear,
)
_NORMS = {"RMSNorm": RMS_NORM, "LayerNorm": LAYER_NORM, "FusedLayerNorm": LAYER_NORM}
_NORM_HOMES = ("megatron_async", "torch", "transformer_engine", "megatron")
_PLAIN_CONFIG: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "fp32_residual_connection": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0,),
    "no_rope_freq": (None,),
}
"""Fields of megatron's config, and the values with which it computes what the kernels do."""


def why_not(model: Any) -> str | None:
    """Why ``model`` decodes with its own forward; None if the fused one takes it."""
    weight = next(model.parameters())
    if weight.device.type != "cuda":
        return "the model is not on a GPU"
    return cuda.unavailable(weight.device.index or 0) or model_why_not(model)


def model_why_not(model: Any) -> str | None:
    """:func:`why_not` on a GPU that runs the kernels."""
    if any(p.dtype != torch.bfloat16 or not p.is_contiguous() for p in model.parameters()):
        return "its parameters are not all contiguous bfloat16"
    if any(p.data_ptr() % 16 for p in model.parameters()):
        return "a parameter does not begin at a multiple of 16 bytes"
    config = model.config
    for name, plain in _PLAIN_CONFIG.items():
        value = getattr(config, name, plain[0])
        if value not in plain:
            return f"config {name}={value!r}"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a module has forward hooks"
    for layer in model.decoder.layers:
        reason = _layer_why_not(layer, config)
        if reason is not None:
            return f"layer {layer.layer_number}: {reason}"
    if len({_build(layer, config) for layer in model.decoder.layers}) > 1:
        return "its layers are not all built alike"
    norm = model.decoder.final_layernorm
    if norm_kind(norm) != norm_kind(model.decoder.layers[0].input_layernorm):
        return f"its final norm is a {type(norm).__name__}"
    if getattr(model.embedding, "tokentype_embeddings", None) is not None:
        return "it has token type embeddings"
    return _ends_why_not(model)


def _ends_why_not(model: Any) -> str | None:
    """What is around the layers; a subclass may compute anything."""
    head = model.output_layer
    for part, known in (
        (model.embedding, (LanguageModelEmbedding,)),
        (model.decoder, (TransformerBlock,)),
        (head, (ColumnParallelLinear, type(None))),
    ):
        if type(part) not in known:
            return f"{type(part).__name__} is not covered"
    return None if getattr(head, "bias", None) is None else "its output layer has a bias"


def _layer_why_not(layer: Any, config: Any) -> str | None:
    attention, mlp = layer.self_attention, layer.mlp
    if type(layer) not in (DecoderLayer, TransformerLayer):
        return f"{type(layer).__name__} is not covered"
    if not isinstance(layer.cross_attention, IdentityOp):
        return "it has cross attention"
    adds = (layer.self_attn_bda, layer.mlp_bda)
    if any(add is not get_bias_dropout_add for add in adds):
        return "its outputs are not added to the residual stream as they are"
    kinds = {norm_kind(layer.input_layernorm), norm_kind(layer.pre_mlp_layernorm)}
    if len(kinds) > 1 or None in kinds:
        return f"norm {type(layer.input_layernorm).__name__} is not covered"
    if type(attention) is not PagedSelfAttention or type(mlp) is not MLP:
        return f"{type(attention).__name__} with {type(mlp).__name__} is not covered"
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        if type(linear) not in _LINEARS:
            return f"linear layer {type(linear).__name__} is not covered"
        if linear.weight.shape[1] % STAGE_K or linear.weight.shape[0] % 16:
            return f"a weight of {tuple(linear.weight.shape)} is not covered"
    norms = (attention.q_layernorm, attention.k_layernorm)
    if not all(n is None or isinstance(n, IdentityOp) for n in norms):
        if any(norm_kind(n) != RMS_NORM for n in norms):
            return "norms of the heads are not RMSNorm"
        if norms[0].eps != norms[1].eps:
            return "norms of queries and keys differ in epsilon"
    if epilogue_of(mlp, config) is None:
        return "its activation is not covered"
    return None


def _build(layer: Any, config: Any) -> tuple[Any, ...]:
    """What all layers have in common, for one plan serves them."""
    attention, mlp = layer.self_attention, layer.mlp
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return (
        *(tuple(linear.weight.shape) for linear in linears),
        norm_kind(layer.input_layernorm),
        norm_kind(attention.q_layernorm),
        epilogue_of(mlp, config),
    )


def norm_kind(norm: Any) -> int | None:
    """``RMS_NORM`` or ``LAYER_NORM`` for a norm that multiplies by its weight; else None."""
    home = type(norm).__module__.partition(".")[0]
    if home not in _NORM_HOMES or getattr(norm, "zero_centered_gamma", False):
        return None
    if getattr(norm, "weight", None) is None or getattr(norm, "eps", None) is None:
        return None
    return _NORMS.get(type(norm).__name__)


def epilogue_of(mlp: Any, config: Any) -> int | None:
    """Which epilogue of the first product is the MLP's activation; None if none is."""
    own: dict[Any, int] = {
        activation.SwiGLU: SILU_GATE,
        activation.GELU: GELU,
        activation.GELUTanh: GELU_TANH,
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
