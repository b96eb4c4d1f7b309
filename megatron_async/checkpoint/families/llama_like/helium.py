"""Helium 1: rotated pairs are next to each other."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {"attention_output_bias": False}


FAMILY = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    config=config,
    names=Names(interleaved=True),
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
)
