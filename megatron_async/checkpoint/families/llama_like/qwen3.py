"""Qwen3, dense: a norm of each head's query and key."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.llama_like.qwen2 import DEFAULTS, window
from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {"qk_norm": True, "mlp_bias": False, **window(fields)}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=config,
    defaults={**DEFAULTS, "head_dim": 128},
)
