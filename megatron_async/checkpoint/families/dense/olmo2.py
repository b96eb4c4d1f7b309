"""OLMo 2: norms behind attention and MLP; queries and keys are normed as one vector each."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {
        "norm_placement": "post",
        "qk_norm": True,
        "qk_norm_kind": "projection",
        "mlp_bias": False,
    }


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    config=config,
    names=Names(
        post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"
    ),
    defaults={"rms_norm_eps": 1e-5},
)
