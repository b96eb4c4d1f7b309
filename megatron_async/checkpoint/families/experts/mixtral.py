"""Mixtral: Mistral with layers of experts."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.llama_like.mistral import config as mistral
from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.family import Family, Names, expert_fields
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    size = fields.read("intermediate_size", int)
    return {
        **mistral(fields),
        **expert_fields(fields),
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": size,
    }


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=config,
    names=Names(
        in_memory=(("block_sparse_moe.gate.", "mlp.gate."),),
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            stacked_router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}.",
            fc1=("w1", "w3"),
            fc2="w2",
        ),
    ),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_experts": "num_local_experts"},
    also={"num_experts": "num_local_experts"},
)
