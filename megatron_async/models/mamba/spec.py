"""megatron ``ModuleSpec`` trees of hybrid models, by their pattern."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.layers import AttentionLayer, MambaLayer, MlpLayer
from megatron_async.models.mamba.mixer import MambaMixer
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, MAMBA, MLP

from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules  # isort: skip


def hybrid_layer_specs(
    config: ModelConfig,
    norm: type,
    whole_layers: Sequence[ModuleSpec],
) -> list[ModuleSpec]:
    """One spec for each letter of the pattern.

    Args:
        norm: of a layer's input.
        whole_layers: with attention and MLP, of which one part is taken.
    """
    pattern = config.hybrid_override_pattern
    assert pattern is not None
    params = {"residual_multiplier": config.residual_multiplier}

    def attention(number: int) -> ModuleSpec:
        whole = whole_layers[number].submodules
        parts = TransformerLayerSubmodules(
            input_layernorm=whole.input_layernorm,
            self_attention=whole.self_attention,
            self_attn_bda=whole.self_attn_bda,
        )
        return ModuleSpec(module=AttentionLayer, params=params, submodules=parts)

    def mlp(number: int) -> ModuleSpec:
        whole = whole_layers[number].submodules
        parts = TransformerLayerSubmodules(
            pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
        )
        return ModuleSpec(module=MlpLayer, params=params, submodules=parts)

    def mamba(number: int) -> ModuleSpec:
        mixer = ModuleSpec(module=MambaMixer, params={"model": config})
        return ModuleSpec(module=MambaLayer, params={**params, "norm": norm, "mixer": mixer})

    kinds = {MAMBA: mamba, ATTENTION: attention, MLP: mlp, EXPERTS: mlp}
    return [kinds[letter](number) for number, letter in enumerate(pattern)]


def number_attention_layers(layers: torch.nn.ModuleList) -> None:
    """Tell the attention layers which layer of the KV cache is theirs."""
    attending = [layer for layer in layers if isinstance(layer, AttentionLayer)]
    for place, layer in enumerate(attending):
        layer.self_attention.cache_layer = place
