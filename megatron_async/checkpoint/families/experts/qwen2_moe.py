"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and shared ones with a gate."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import (
    Family,
    expert_fields,
    expert_layers,
    sliding_layers,
)
from megatron_async.checkpoint.reading.fields import Fields


def window(fields: Fields) -> dict[str, Any]:
    """Every other layer has a window, below ``max_window_layers``, where windows are on."""
    if not fields.read("use_sliding_window", bool, False):
        return sliding_layers(fields, None)
    end = fields.read("max_window_layers", int)
    size = fields.optional("sliding_window", int)
    return sliding_layers(fields, size, lambda n: n % 2 == 0 and n < end)


def config(fields: Fields) -> dict[str, Any]:
    return {
        **expert_fields(fields),
        **window(fields),
        "moe_layer_freq": expert_layers(fields),
        "moe_ffn_hidden_size": fields.read("moe_intermediate_size", int),
        "moe_shared_expert_intermediate_size": fields.read("shared_expert_intermediate_size", int),
        "moe_shared_expert_gate": True,
        "qkv_bias": fields.read("qkv_bias", bool),
        "attention_output_bias": False,
        "mlp_bias": False,
    }


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=config,
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
)
