"""Weights of multi-latent attention in Hugging Face directories: DeepSeek's names, and megatron's.

Rows are in the same order in both: rotated pairs are neighbours.
"""

from __future__ import annotations

from typing import Any

from megatron_async.models.description.config import ModelConfig

_ALWAYS = {
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
_QUERIES = {"q_proj": "linear_q_proj"}
_LATENT_QUERIES = {
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
}


def latent_targets(targets: Any, config: ModelConfig, theirs: str, ours: str) -> None:
    """Targets of a layer's attention, by the prefixes of its stored names and of its parameters.

    Args:
        targets: a ``huggingface_weights.Targets``.
    """
    assert config.latent_attention is not None
    is_direct = config.latent_attention.q_lora_rank is None
    names = _ALWAYS | (_QUERIES if is_direct else _LATENT_QUERIES)
    for stored, name in names.items():
        targets.whole(f"{theirs}self_attn.{stored}.weight", f"{ours}.self_attention.{name}.weight")
