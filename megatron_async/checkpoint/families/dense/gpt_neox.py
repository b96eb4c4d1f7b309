"""GPT-NeoX and Pythia: attention and MLP side by side; a quarter of each head is rotated."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    parallel = fields.read("use_parallel_residual", bool, True)
    return {
        "num_kv_heads": fields.read("num_attention_heads", int),
        "normalization": "LayerNorm",
        "parallel_residual": "two_norms" if parallel else None,
        "mlp_bias": True,
    }


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    config=config,
    names=Names(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        in_memory=(("embed_out.", "lm_head."),),
        layer="gpt_neox.layers.{}.",
        qkv=("attention.query_key_value",),
        qkv_layout="by_head",
        projection="attention.dense",
        fc1=("mlp.dense_h_to_4h",),
        fc2="mlp.dense_4h_to_h",
        ignored=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "intermediate_size": 24576,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    aliases={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    gated=False,
    partial_rotary=True,
)
