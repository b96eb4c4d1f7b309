"""Phi-3 and Phi-3.5: one projection for queries, keys and values, one for gate and up; longrope."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    biases = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
    return {**biases, "sliding_window": fields.optional("sliding_window", int)}


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    config=config,
    names=Names(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    partial_rotary=True,
    rope_kinds={"su": "longrope", "yarn": "longrope"},
)
