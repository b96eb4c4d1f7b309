"""Cohere Command R: attention and MLP side by side behind one norm without a bias."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    return {
        "normalization": "LayerNorm",
        "norm_bias": False,
        "parallel_residual": "one_norm",
        "qk_norm": fields.read("use_qk_norm", bool, False),
        "qk_norm_kind": "each_head",
        "mlp_bias": False,
        "logit_multiplier": fields.read("logit_scale", float),
    }


FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    config=config,
    names=Names(interleaved=True),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
    },
    aliases={"rms_norm_eps": "layer_norm_eps"},
)
