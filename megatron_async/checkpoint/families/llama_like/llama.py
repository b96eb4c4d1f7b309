"""Llama 1 to 3, and what is stored as such."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, sliding_layers
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return sliding_layers(fields, None)


FAMILY = Family(model_type="llama", architecture="LlamaForCausalLM", config=config)
