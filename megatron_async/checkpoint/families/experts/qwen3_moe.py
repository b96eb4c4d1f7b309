"""Qwen3-MoE: layers of experts, and a norm of each head's query and key."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, expert_fields, expert_layers
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    has_window = fields.read("use_sliding_window", bool, False)
    return {
        **expert_fields(fields),
        "moe_layer_freq": expert_layers(fields),
        "moe_ffn_hidden_size": fields.read("moe_intermediate_size", int),
        "sliding_window": fields.optional("sliding_window", int) if has_window else None,
        "qk_norm": True,
        "mlp_bias": False,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=config,
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    also={"num_local_experts": "num_experts"},  # transformers 5 writes this name
)
