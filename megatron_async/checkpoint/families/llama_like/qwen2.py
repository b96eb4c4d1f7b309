"""Qwen2 and Qwen2.5: biases of queries, keys and values; the last layers may have a window."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, sliding_layers
from megatron_async.checkpoint.reading.fields import Fields


def window(fields: Fields) -> dict[str, Any]:
    """``sliding_window`` where ``use_sliding_window`` is on, from ``max_window_layers`` on."""
    if not fields.read("use_sliding_window", bool, False):
        return sliding_layers(fields, None)
    first = fields.read("max_window_layers", int)
    return sliding_layers(fields, fields.optional("sliding_window", int), lambda n: n >= first)


def config(fields: Fields) -> dict[str, Any]:
    biases = {"qkv_bias": True, "attention_output_bias": False, "mlp_bias": False}
    return {**biases, **window(fields)}


DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILY = Family(
    model_type="qwen2", architecture="Qwen2ForCausalLM", config=config, defaults=DEFAULTS
)
