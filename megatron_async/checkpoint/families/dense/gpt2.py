"""GPT-2: learned positions; linear weights are stored as [in, out]."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    scaled = fields.read("scale_attn_weights", bool, True)
    return {
        "num_kv_heads": fields.read("num_attention_heads", int),
        "max_sequence_length": fields.read("max_position_embeddings", int),
        "position_embedding": "learned_absolute",
        "normalization": "LayerNorm",
        "attention_scale": None if scaled else 1.0,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config=config,
    names=Names(
        prefix="transformer.",
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        input_norm="ln_1",
        pre_mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        projection="attn.c_proj",
        fc1=("mlp.c_fc",),
        fc2="mlp.c_proj",
        transposed=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    aliases={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    also={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    gated=False,
    has_rope=False,
)
