"""Ministral 3: queries grow with the logarithm of their position (Llama 4's scaling)."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.huggingface.rope_fields import given_rope, rope_kind
from megatron_async.checkpoint.reading.fields import Fields

ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(fields: Fields) -> dict[str, Any]:
    rope = given_rope(fields)
    # transformers counts from the rope's own length with every kind, and lets another length beside
    # the rope win, or the longest stand in, with some.
    tokens = rope.optional("original_max_position_embeddings", int)
    if rope_kind(rope) in ("llama3", "yarn", "longrope"):
        beside = fields.optional("original_max_position_embeddings", int)
        longest = fields.read("max_position_embeddings", int)
        tokens = beside if beside is not None else tokens if tokens is not None else longest
    if tokens is None:
        tokens = rope.read("original_max_position_embeddings", int)
    is_on = rope.get("llama_4_scaling_beta") != 0
    return {
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "sliding_window": fields.optional("sliding_window", int),
        "query_scaling_beta": rope.read("llama_4_scaling_beta", float) if is_on else None,
        "query_scaling_tokens": tokens if is_on else None,
    }


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    config=config,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
    },
)
