"""OLMoE: layers of experts; queries and keys are normed as one vector each."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, expert_fields
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {
        **expert_fields(fields),
        "moe_ffn_hidden_size": fields.read("intermediate_size", int),
        "qk_norm": True,
        "qk_norm_kind": "projection",
        "mlp_bias": False,
    }


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=config,
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    also={"num_local_experts": "num_experts"},
)
