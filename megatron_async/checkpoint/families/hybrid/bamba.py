"""Bamba: Mamba-2 or attention, then an MLP, in each layer; half of each head is rotated."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, Names, layer_count
from megatron_async.checkpoint.huggingface.hybrid_fields import mamba_fields, pattern_fields
from megatron_async.checkpoint.huggingface.rope_fields import given_rope
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.mamba.sizes import ATTENTION, MAMBA, MLP

ROTATED = 0.5
MAMBA_ALIASES = {
    "mamba_hidden_act": "hidden_act",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_groups": "mamba_n_groups",
    "mamba_state_dim": "mamba_d_state",
    "mamba_conv_kernel": "mamba_d_conv",
}
MAMBA_DEFAULTS = {
    "mamba_num_heads": 128,
    "mamba_num_groups": 1,
    "mamba_state_dim": 256,
}


def config(fields: Fields) -> dict[str, Any]:
    attending = fields.optional("attn_layer_indices", list) or ()
    kinds = [ATTENTION if n in attending else MAMBA for n in range(layer_count(fields))]
    # transformers takes a half whatever the file says beside the rope.
    rotated = given_rope(fields).optional("partial_rotary_factor", float, ROTATED)
    return {
        **mamba_fields(fields, expanded=True),
        "rotary_fraction": 1.0 if rotated is None else rotated,
        **pattern_fields("".join(kind + MLP for kind in kinds)),
    }


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    config=config,
    names=Names(
        final_norm="model.final_layernorm",
        pre_mlp_norm="pre_ff_layernorm",
        fc1=("feed_forward.gate_proj", "feed_forward.up_proj"),
        fc2="feed_forward.down_proj",
        parts=2,
    ),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": ROTATED,
        **MAMBA_DEFAULTS,
    },
    aliases=MAMBA_ALIASES,
    partial_rotary=True,
)
