"""MiMo: Qwen2 with dense layers for multi-token prediction, which draft."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.llama_like.qwen2 import DEFAULTS
from megatron_async.checkpoint.families.llama_like.qwen2 import config as qwen2
from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {**qwen2(fields), "mtp_num_layers": fields.read("num_nextn_predict_layers", int, 0)}


FAMILY = Family(model_type="mimo", architecture="MiMoForCausalLM", config=config, defaults=DEFAULTS)
