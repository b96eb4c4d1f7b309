"""Mamba-2: layers of Mamba-2 alone, whose requests have no limit of their own."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names, layer_count
from megatron_async.checkpoint.huggingface.hybrid_fields import mamba_fields, pattern_fields
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.mamba.sizes import MAMBA

MOST_TOKENS = 2**17
"""A request has at most this many tokens where ``config.json`` does not say."""


def config(fields: Fields) -> dict[str, Any]:
    return {
        **mamba_fields(fields, expanded=True),
        **pattern_fields(MAMBA * layer_count(fields)),
        "position_embedding": "none",
        "max_sequence_length": fields.read("max_position_embeddings", int, MOST_TOKENS),
    }


FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    config=config,
    names=Names(
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer="backbone.layers.{}.",
        input_norm="norm",
        mamba="mixer",
    ),
    defaults={
        "num_attention_heads": 1,
        "intermediate_size": 1,
        "rms_norm_eps": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_num_groups": 8,
        "mamba_state_dim": 128,
    },
    aliases={
        "head_dim": "attention_head_dim",
        "rms_norm_eps": "layer_norm_epsilon",
        "mamba_hidden_act": "hidden_act",
        "mamba_num_heads": "num_heads",
        "mamba_head_dim": "head_dim",
        "mamba_num_groups": "n_groups",
        "mamba_state_dim": "state_size",
        "mamba_conv_kernel": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
        "mamba_expand": "expand",
    },
    has_rope=False,
)
