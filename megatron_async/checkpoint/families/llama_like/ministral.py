"""Ministral: Mistral whose layers may take turns with and without a window."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, sliding_layers
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    biases = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
    return {**biases, **sliding_layers(fields, fields.optional("sliding_window", int))}


FAMILY = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    config=config,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
