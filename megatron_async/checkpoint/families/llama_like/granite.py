"""Granite 3, dense: multipliers of embedding, attention, residual additions and logits."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {
        "embedding_multiplier": fields.read("embedding_multiplier", float, 1.0),
        "residual_multiplier": fields.read("residual_multiplier", float, 1.0),
        "attention_scale": fields.read("attention_multiplier", float, 1.0),
        "logit_multiplier": 1 / (fields.read("logits_scaling", float, 1.0) or 1.0),
    }


FAMILY = Family(model_type="granite", architecture="GraniteForCausalLM", config=config)
