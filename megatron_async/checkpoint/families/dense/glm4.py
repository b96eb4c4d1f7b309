"""GLM-4, dense: norms before and behind each part; half of each head is rotated, by pairs."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {"norm_placement": "both", "attention_output_bias": False, "mlp_bias": False}


DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    config=config,
    names=Names(
        post_attention_norm="post_self_attn_layernorm",
        post_mlp_norm="post_mlp_layernorm",
        fc1=("mlp.gate_up_proj",),
        interleaved=True,
    ),
    defaults=DEFAULTS,
    partial_rotary=True,
)
