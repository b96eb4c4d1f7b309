"""StarCoder2: LayerNorm, an MLP without a gate, biases; all layers have a window, or none."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    bias = fields.read("use_bias", bool, True)
    return {
        "normalization": "LayerNorm",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "sliding_window": fields.optional("sliding_window", int),
    }


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    config=config,
    names=Names(fc1=("mlp.c_fc",), fc2="mlp.c_proj"),
    defaults={
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    aliases={"rms_norm_eps": "norm_epsilon"},
    gated=False,
)
