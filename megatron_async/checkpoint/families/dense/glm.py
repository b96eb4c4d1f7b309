"""GLM-4-9B of 2024: half of each head is rotated, by pairs."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.dense.glm4 import DEFAULTS
from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {"attention_output_bias": False, "mlp_bias": False}


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    config=config,
    names=Names(fc1=("mlp.gate_up_proj",), interleaved=True),
    defaults=DEFAULTS,
    partial_rotary=True,
)
