"""Which blocks of a model the fused kernels compute, and why not the others.

The kernels read a model's parameters and leave its modules' ``forward`` aside. So whatever is not
known to be what they compute has a reason here, and such a block decodes with its modules. A reason
of one block says nothing about the others: a layer of experts keeps its fused attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm.tile_config import (
    RMS_NORM,
    STAGE_K,
)
from megatron_async.kernels.shared_memory import block_limit
from megatron_async.megatron_compat.specs import MTP_LAYERS, mtp_inner_layer
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks.kernel_parameters import (
    e4m3_why_not,
    epilogue_of,
    norm_kind,
    scale_of,
)
from megatron_async.models.fused.blocks.moe_block import experts_why_not, is_mixture
from megatron_async.models.fused.report import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MAMBA,
    MLP,
    PROJECTION,
    Block,
)
from megatron_async.models.fused.shared_experts import linears_apart
from megatron_async.models.layers import decoder_layer
from megatron_async.models.layers.attention import PagedSelfAttention
from megatron_async.models.mamba.layers import AttentionLayer, MambaLayer, MlpLayer
from megatron_async.models.mamba.mixer import MambaMixer
from megatron_async.models.mamba.states import kernels_why_not
from megatron_async.models.quantized.linear import plain_class

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.models.common.embeddings.language_model_embedding import (  # isort: skip
    LanguageModelEmbedding,
)
from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer import mlp as megatron_mlp  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlock  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

_LINEARS = (
    ColumnParallelLinear,
    RowParallelLinear,
    decoder_layer.BiasedColumnParallelLinear,
    decoder_layer.RowParallelLinear,
    decoder_layer.BiasedRowParallelLinear,
)
_LAYERS = (decoder_layer.DecoderLayer, TransformerLayer, AttentionLayer, MlpLayer, MambaLayer)
_ALL = {
    "fp32_residual_connection": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
}
_ATTENTION: dict[str, tuple[Any, ...]] = {"no_rope_freq": (None,)}
_MLP: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0,),
}
"""Fields of megatron's config, and the values with which it computes what the kernels do: those of
all blocks, of attention and of MLPs."""


def blocks(
    model: Any, *, parallel: bool = False, stages: bool = False, unwanted: str | None = None
) -> tuple[Block, ...]:
    """The blocks of ``model``, or of the stage that it is, and why there is no fused one in their
    place.

    Args:
        parallel: the ranks of a tensor-parallel group add their partial sums up.
        stages: the stages of a pipeline hand hidden states on.
        unwanted: why no block shall be fused.
    """
    off = (
        unwanted
        or where.device_why_not(model)
        or model_why_not(model, parallel=parallel, stages=stages)
    )
    found = []
    if model.pre_process:
        found.append(Block(EMBEDDING, None, off or embedding_why_not(model)))
    for layer in model.decoder.layers if hasattr(model.decoder, "layers") else ():
        reason = off or layer_why_not(layer)
        number, has = layer.layer_number, kinds_of(layer)
        if ATTENTION in has:
            found.append(Block(ATTENTION, number, reason or attention_why_not(layer, model)))
        if MLP in has:
            found.append(Block(MLP, number, reason or mlp_why_not(layer, model.config)))
        if MAMBA in has:
            mamba = reason or mamba_why_not(layer, parallel=parallel)
            found.append(Block(MAMBA, number, mamba))
    if model.post_process:
        found.append(Block(HEAD, None, off or head_why_not(model)))
    return tuple(found)


def kinds_of(layer: Any) -> tuple[str, ...]:
    """The kinds of a layer's blocks, in their order."""
    parts = {AttentionLayer: (ATTENTION,), MlpLayer: (MLP,), MambaLayer: (MAMBA,)}
    return parts.get(type(layer), (ATTENTION, MLP))


def mtp_blocks(model: Any, *, unwanted: str | None = None) -> tuple[Block, ...]:
    """The blocks of the MTP layers of ``model`` when they draft, four of each layer, and why there
    is no fused one in their place; none without such layers.

    Args:
        unwanted: why no block shall be fused.
    """
    if not model.mtp_process:
        return ()
    off = unwanted or where.device_why_not(model) or model_why_not(model)
    found = []
    for layer in model.mtp.layers:
        inner = mtp_inner_layer(layer)
        reason = off or _mtp_layer_why_not(layer)
        inside = reason or layer_why_not(inner)
        number = inner.layer_number
        found += [
            Block(PROJECTION, number, reason or projection_why_not(layer, model)),
            Block(ATTENTION, number, inside or attention_why_not(inner, model)),
            Block(MLP, number, inside or _draft_mlp_why_not(inner, model.config)),
            Block(HEAD, number, reason or head_why_not(model, layer.final_layernorm)),
        ]
    return tuple(found)


def _mtp_layer_why_not(layer: Any) -> str | None:
    """Why an MTP layer is not its projection, its transformer layer and a norm."""
    if type(layer) not in MTP_LAYERS:
        return f"{type(layer).__name__} is not covered"
    return "it has forward hooks" if _has_hooks(layer) else None


def _draft_mlp_why_not(layer: Any, config: Any) -> str | None:
    """Why the MLP of an MTP layer is not computed by kernels."""
    if is_mixture(layer.mlp) and layer.mlp.ranks is not None:
        return "its experts are split over ranks"
    return mlp_why_not(layer, config)


def projection_why_not(layer: Any, model: Any) -> str | None:
    """Why what is in front of an MTP layer's transformer layer is not computed by kernels."""
    norms, projection = (layer.enorm, layer.hnorm), layer.eh_proj
    for norm in norms:
        if norm_kind(norm) is None:
            return f"norm {type(norm).__name__} is not covered"
    if getattr(projection, "bias", None) is not None:
        return "its projection has a bias"
    return (
        embedding_why_not(model)
        or _linears_why_not(projection)
        or _modules_why_not([*norms, projection], [projection])
    )


def model_why_not(model: Any, *, parallel: bool = False, stages: bool = False) -> str | None:
    """Why no block of ``model`` can be fused on a GPU that runs the kernels."""
    if type(model.decoder) is not TransformerBlock:
        return f"{type(model.decoder).__name__} is not covered"
    if _has_hooks(model, model.decoder):
        return "the model has forward hooks"
    size = model.config.tensor_model_parallel_size
    if size > 1 and not parallel:
        return f"config tensor_model_parallel_size={size}"
    size = model.config.pipeline_model_parallel_size
    if size > 1 and not stages:
        return f"config pipeline_model_parallel_size={size}"
    return _config_why_not(model.config, _ALL)


def embedding_why_not(model: Any) -> str | None:
    """Why ``model.embedding`` is not computed by a kernel."""
    embedding = model.embedding
    if type(embedding) is not LanguageModelEmbedding:
        return f"{type(embedding).__name__} is not covered"
    if getattr(embedding, "tokentype_embeddings", None) is not None:
        return "it has token type embeddings"
    if model.config.hidden_size % STAGE_K:
        return f"a hidden size of {model.config.hidden_size} is not covered"
    return _modules_why_not([embedding])


def head_why_not(model: Any, norm: Any = None) -> str | None:
    """Why the final norm, of the decoder if no other is given, and the output layer are not
    computed by a kernel."""
    norm, head = norm or model.decoder.final_layernorm, model.output_layer
    if norm_kind(norm) is None:
        return f"norm {type(norm).__name__} is not covered"
    if type(head) not in (ColumnParallelLinear, type(None)):
        return f"{type(head).__name__} is not covered"
    if getattr(head, "bias", None) is not None:
        return "its output layer has a bias"
    if getattr(getattr(head, "weight", None), "dtype", None) == torch.float8_e4m3fn:
        return "its output layer has e4m3 weights"
    if norm.weight.shape[0] % STAGE_K:
        return f"a hidden size of {norm.weight.shape[0]} is not covered"
    modules = [norm] if head is None else [norm, head]
    if model.share_embeddings_and_output_weights and model.pre_process:
        modules.append(model.embedding.word_embeddings)
    return _modules_why_not(modules)


def layer_why_not(layer: Any) -> str | None:
    """Why a layer is not its attention and its MLP, one after the other."""
    if type(layer) not in _LAYERS:
        return f"{type(layer).__name__} is not covered"
    if getattr(layer, "residual_multiplier", 1.0) != 1:
        return "its output is not added to the residual stream as it is"
    if not isinstance(getattr(layer, "cross_attention", IdentityOp()), IdentityOp):
        return "it has cross attention"
    return "it has forward hooks" if _has_hooks(layer) else None


def attention_why_not(layer: Any, model: Any) -> str | None:
    """Why a layer's attention is not computed by kernels, whatever the context."""
    attention, norm = layer.self_attention, layer.input_layernorm
    if layer.self_attn_bda is not get_bias_dropout_add:
        return "its output is not added to the residual stream as it is"
    if type(attention) is not PagedSelfAttention:
        return f"{type(attention).__name__} is not covered"
    if norm_kind(norm) is None:
        return _norm_why_not(norm, attention.linear_qkv)
    norms = (attention.q_layernorm, attention.k_layernorm)
    if not all(n is None or isinstance(n, IdentityOp) for n in norms):
        if any(norm_kind(n) != RMS_NORM for n in norms):
            return "norms of the heads are not RMSNorm"
        if norms[0].eps != norms[1].eps:
            return "norms of queries and keys differ in epsilon"
    if attention.sinks is not None and attention.sinks.dtype != torch.bfloat16:
        return f"its sinks are {attention.sinks.dtype}"
    if attention.query_scaling is not None:
        return "its queries are scaled by their position"
    rotary = attention.rotary
    if rotary is not None and rotary.long is not None:
        return "its rotation depends on the request's length"
    group = attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
    return (
        _linears_why_not(attention.linear_qkv, attention.linear_proj)
        or _config_why_not(model.config, _ATTENTION)
        or decode_attention.unsupported(
            attention.hidden_size_per_attention_head,
            group,
            block_size=16,  # of the context, which is asked later
            rotated=0 if rotary is None else 2 * rotary.cos_sin.shape[2],
            limit=block_limit(attention.linear_qkv.weight.device),
        )
        or _modules_why_not([norm, attention], [attention.linear_qkv, attention.linear_proj])
    )


def mamba_why_not(layer: Any, *, parallel: bool = False) -> str | None:
    """Why a layer's Mamba-2 mixer is not computed by kernels."""
    mixer, norm = layer.mixer, layer.norm
    if type(mixer) is not MambaMixer:
        return f"{type(mixer).__name__} is not covered"
    linears = mixer.in_proj, mixer.out_proj
    if parallel:
        return "it is not split over ranks"
    if norm_kind(norm) is None:
        return _norm_why_not(norm, mixer.in_proj)
    if _has_hooks(*mixer.modules()):
        return "a module has forward hooks"
    return (
        _linears_why_not(*linears)
        or _modules_why_not([norm, *linears, mixer.norm, mixer.conv1d], linears)
        or kernels_why_not(mixer.parameters_between)
    )


def mlp_why_not(layer: Any, config: Any) -> str | None:
    """Why a layer's MLP is not computed by kernels."""
    mlp, norm = layer.mlp, layer.pre_mlp_layernorm
    if layer.mlp_bda is not get_bias_dropout_add:
        return "its output is not added to the residual stream as it is"
    if is_mixture(mlp):
        if norm_kind(norm) is None:
            return f"norm {type(norm).__name__} is not covered"
        if _has_hooks(*mlp.modules()):
            return "a module has forward hooks"
        apart = linears_apart(mlp)
        reason = experts_why_not(mlp, config)
        if reason is None and apart:
            reason = _linears_why_not(*apart)
        return reason or _modules_why_not([norm, *apart], apart)
    if type(mlp) is not megatron_mlp.MLP:
        return f"{type(mlp).__name__} is not covered"
    if norm_kind(norm) is None:
        return _norm_why_not(norm, mlp.linear_fc1)
    linears = mlp.linear_fc1, mlp.linear_fc2
    reason = _linears_why_not(*linears) or _config_why_not(config, _MLP)
    if reason is None and epilogue_of(mlp, config) is None:
        reason = "its activation is not covered"
    return reason or _modules_why_not([norm, mlp], linears)


def _config_why_not(config: Any, plain: dict[str, tuple[Any, ...]]) -> str | None:
    for name, values in plain.items():
        value = getattr(config, name, values[0])
        if value not in values:
            return f"config {name}={value!r}"
    return None


def _norm_why_not(norm: Any, linear: Any) -> str:
    """Say why a norm in front of ``linear`` is not covered."""
    if isinstance(norm, IdentityOp) and hasattr(linear, "layer_norm_weight"):
        return f"its norm is inside {type(linear).__name__}"  # Transformer Engine's
    return f"norm {type(norm).__name__} is not covered"


def _linears_why_not(*linears: Any) -> str | None:
    for linear in linears:
        if plain_class(linear) not in _LINEARS:
            return f"linear layer {type(linear).__name__} is not covered"
        if linear.weight.shape[1] % STAGE_K or linear.weight.shape[0] % 16:
            return f"a weight of {tuple(linear.weight.shape)} is not covered"
        if linear.weight.dtype == torch.float8_e4m3fn and (reason := e4m3_why_not(linear)):
            return reason
    return None


def _modules_why_not(modules: Iterable[Any], linears: Sequence[Any] = ()) -> str | None:
    """What is true of all parts that are read in place of being called.

    Args:
        linears: those of them whose weights may be e4m3, see :func:`_linears_why_not`.
    """
    scaled = [linear for linear in linears if scale_of(linear) is not None]
    e4m3 = {id(tensor) for linear in scaled for tensor in (linear.weight, linear.weight_scale)}
    for module in modules:
        for parameter in (each for each in module.parameters() if id(each) not in e4m3):
            if parameter.dtype != torch.bfloat16 or not parameter.is_contiguous():
                return "its parameters are not all contiguous bfloat16"
            if parameter.data_ptr() % 16:
                return "a parameter does not begin at a multiple of 16 bytes"
        if _has_hooks(*module.modules()):
            return "a module has forward hooks"
    return None


def _has_hooks(*modules: Any) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in modules)
