"""Gemma 2: norms on both sides, soft caps, every other layer with a window, scaled embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names, sliding_layers
from megatron_async.checkpoint.reading.fields import Fields

NAMES = Names(
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256.0,
}
ALIASES = {"hidden_act": "hidden_activation"}


def gemma(fields: Fields, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    hidden_size = fields.read("hidden_size", int)
    scale = fields.read("query_pre_attn_scalar", float)
    return {
        "zero_centered_gamma": True,
        "norm_placement": "both",
        "mlp_bias": False,
        "embedding_multiplier": max(hidden_size, 1) ** 0.5,
        "attention_scale": max(scale, 1e-9) ** -0.5,
        "logit_soft_cap": fields.optional("final_logit_softcapping", float),
        "attention_soft_cap": fields.optional("attn_logit_softcapping", float),
        **sliding_layers(fields, fields.optional("sliding_window", int), is_sliding),
    }


def config(fields: Fields) -> dict[str, Any]:
    return gemma(fields, lambda layer: layer % 2 == 0)


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config=config,
    names=NAMES,
    defaults={**DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    aliases=ALIASES,
)
