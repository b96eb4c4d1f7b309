"""Mistral: all layers have a window, or none."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    # transformers does not read these here.
    biases = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
    return {**biases, "sliding_window": fields.optional("sliding_window", int)}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=config,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
