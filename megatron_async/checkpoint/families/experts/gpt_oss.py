"""GPT-OSS: experts with biases, as MXFP4 or plain, attention sinks, windows in half the layers."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.family import (
    Family,
    Names,
    expert_fields,
    sliding_layers,
)
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    window = fields.optional("sliding_window", int)
    return {
        **expert_fields(fields),
        **sliding_layers(fields, window, lambda layer: layer % 2 == 0),
        "moe_router_pre_softmax": False,
        "moe_router_bias": True,
        "moe_ffn_hidden_size": fields.read("intermediate_size", int),
        "mlp_bias": True,
        "activation": "clamped_swiglu",
        "activation_limit": fields.read("swiglu_limit", float),
        "attention_sinks": True,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    config=config,
    names=Names(
        experts=ExpertNames(
            router="mlp.router",
            stacked_router="mlp.router",
            interleaved=True,
        )
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    aliases={"num_experts": "num_local_experts"},
    also={"num_experts": "num_local_experts"},
    quantization="mxfp4",
)
