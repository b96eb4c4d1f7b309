"""megatron ``ModuleSpec`` trees for the architectures of :class:`ModelConfig`."""

from __future__ import annotations

from typing import Any

import torch

from megatron_async.megatron_compat import specs
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.layers.activation import (
    GEGLU,
    GELU,
    ClampedSwiGLU,
    GEGLUTanh,
    GELUTanh,
    ReLU,
    SquaredReLU,
    SwiGLU,
)
from megatron_async.models.layers.attention import NoCoreAttention, PagedSelfAttention
from megatron_async.models.layers.decoder_layer import (
    BiasedColumnParallelLinear,
    BiasedRowParallelLinear,
    DecoderLayer,
    RowParallelLinear,
)
from megatron_async.models.layers.norm import head_norm_classes, norm_class
from megatron_async.models.quantized.deferred import as_built

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip
from megatron.core.transformer.attention import SelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.multi_token_prediction import (  # isort: skip
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    TransformerLayerSubmodules,
)

_ACTIVATIONS: dict[str, type[torch.nn.Module]] = {
    "swiglu": SwiGLU,
    "clamped_swiglu": ClampedSwiGLU,
    "geglu": GEGLU,
    "geglu_tanh": GEGLUTanh,
    "gelu": GELU,
    "gelu_tanh": GELUTanh,
    "relu": ReLU,
    "squared_relu": SquaredReLU,
}


def _norm(config: ModelConfig, device: torch.device | str) -> type:
    return norm_class(
        config.normalization,
        torch.device(device),
        zero_centered=config.zero_centered_gamma,
        bias=config.norm_bias,
    )


def general_parts(config: ModelConfig, norm: type) -> dict[str, Any] | None:
    """Arguments of a ``GeneralDecoderLayer``; None where :class:`DecoderLayer` will do."""
    parts: dict[str, Any] = {}
    if config.norm_placement != "pre":
        parts["post_norm"] = norm
    if config.parallel_residual is not None:
        parts["parallel_residual"] = config.parallel_residual
    if config.residual_multiplier != 1:
        parts["residual_multiplier"] = config.residual_multiplier
    return parts or None


def mlp_spec(config: ModelConfig, layer: int) -> Any:
    """The MLP of ``layer``, counted from 0: dense, or a mixture of experts."""
    has_experts = config.has_experts(layer)
    # Shared experts have no bias in megatron.
    biased = config.mlp_bias and not has_experts
    submodules = MLPSubmodules(
        linear_fc1=as_built(BiasedColumnParallelLinear if biased else ColumnParallelLinear),
        linear_fc2=as_built(BiasedRowParallelLinear if biased else RowParallelLinear),
        activation_func=_ACTIVATIONS[config.activation],
    )
    if has_experts:
        from megatron_async.models.moe.layer import MoELayer

        return specs.moe_spec(MoELayer, {"model": config}, submodules)
    return specs.mlp_spec(submodules)


def _attention_spec(config: ModelConfig, norm: type) -> ModuleSpec:
    params = {"attn_mask_type": AttnMaskType.causal}
    column = as_built(ColumnParallelLinear)
    attention_row = as_built(
        BiasedRowParallelLinear if config.attention_output_bias else RowParallelLinear
    )
    q_norm, k_norm = IdentityOp, IdentityOp
    if config.qk_norm:
        # Norms of all heads are always ours.
        of_heads = norm if config.qk_norm_kind == "head" else _norm(config, "cpu")
        q_norm, k_norm = head_norm_classes(of_heads, config.qk_norm_kind)
    if config.latent_attention is not None:
        from megatron_async.models.layers.latent_attention import PagedLatentAttention

        from megatron.core.transformer.multi_latent_attention import (  # isort: skip
            MLASelfAttentionSubmodules,
        )

        latent = MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=ColumnParallelLinear,  # of these two attention makes others
            linear_q_up_proj=column,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,  # attention reads the weight itself
            core_attention=NoCoreAttention,
            linear_proj=attention_row,
            q_layernorm=norm,
            kv_layernorm=norm,
        )
        return ModuleSpec(module=PagedLatentAttention, params=params, submodules=latent)
    return ModuleSpec(
        module=PagedSelfAttention,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=NoCoreAttention,
            linear_proj=attention_row,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def gpt_layer_spec(
    config: ModelConfig, device: torch.device | str = "cpu", layer: int = 0
) -> ModuleSpec:
    """One transformer layer, counted from 0, with :class:`PagedSelfAttention` and megatron's own
    linears."""
    norm = _norm(config, device)
    has_input_norm = config.norm_placement != "post"
    has_mlp_norm = has_input_norm and config.parallel_residual != "one_norm"
    general = general_parts(config, norm)
    module: type = DecoderLayer
    if general is not None:
        from megatron_async.models.layers.general_layer import GeneralDecoderLayer

        module = GeneralDecoderLayer
    return ModuleSpec(
        module=module,
        params=general or {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if has_input_norm else IdentityOp,
            self_attention=_attention_spec(config, norm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if has_mlp_norm else IdentityOp,
            mlp=mlp_spec(config, layer),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def gpt_block_spec(
    config: ModelConfig, num_layers: int, device: torch.device | str = "cpu", first: int = 0
) -> TransformerBlockSubmodules:
    """The decoder: ``num_layers`` layers, those of this pipeline stage from ``first`` on, and the
    final norm."""
    norm = _norm(config, device)
    layers = range(first, first + num_layers)
    specs = [gpt_layer_spec(config, device, layer) for layer in layers]
    if config.hybrid_override_pattern is not None:
        from megatron_async.models.mamba.spec import hybrid_layer_specs

        specs = hybrid_layer_specs(config, norm, specs)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def mtp_block_spec(config: ModelConfig, device: torch.device | str = "cpu") -> ModuleSpec | None:
    """The multi-token prediction layers (DeepSeek-V3, arXiv:2412.19437); None if there are none."""
    if config.mtp_num_layers == 0:
        return None
    norm = _norm(config, device)
    layer = ModuleSpec(
        module=specs.MultiTokenPredictionLayer,
        submodules=specs.mtp_submodules(
            gpt_layer_spec(config, device, config.num_layers - 1),
            enorm=norm,
            hnorm=norm,
            eh_proj=as_built(ColumnParallelLinear),
            layer_norm=norm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers),
    )
