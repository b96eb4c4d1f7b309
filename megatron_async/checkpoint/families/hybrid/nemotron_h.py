"""Nemotron-H: one of Mamba-2, attention, MLP and experts in each layer; no positions."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface import hybrid_fields as hybrid
from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.family import Family, Names
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.mamba.sizes import EXPERTS

LIST = "layers_block_type"


def config(fields: Fields) -> dict[str, Any]:
    # A list wins over a pattern, as in transformers.
    is_listed = fields.get(LIST) is not None
    kinds = None if is_listed else hybrid.pattern(fields, "hybrid_override_pattern")
    kinds = kinds or hybrid.letters(fields, LIST, None)
    head_dim = fields.optional("attention_head_dim", int)  # as its authors' files have it
    return {
        **({} if head_dim is None else {"head_dim": head_dim}),
        **hybrid.mamba_fields(fields),
        **hybrid.pattern_fields(kinds),
        **(hybrid.sigmoid_experts(fields) if EXPERTS in kinds else {}),
        "position_embedding": "none",
        "max_sequence_length": fields.read("max_position_embeddings", int),
    }


SHARED = "mixer.shared_experts."
FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    config=config,
    names=Names(
        embedding="backbone.embeddings", final_norm="backbone.norm_f", layer="backbone.layers.{}.",
        input_norm="norm", pre_mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), projection="mixer.o_proj",
        fc1=("mixer.up_proj",), fc2="mixer.down_proj", mamba="mixer",
        in_memory=(("backbone.", "model."),),
        experts=ExpertNames(
            router="mixer.gate", expert="mixer.experts.{}.", fc1=("up_proj",),
            stacked="mixer.experts.", stacked_fc1="up_proj", stacked_router="mixer.gate",
            shared_fc1=(f"{SHARED}up_proj",), shared_fc2=f"{SHARED}down_proj",
            expert_bias="mixer.gate.e_score_correction_bias", latent="mixer.",
        ),
    ),
    defaults={
        "num_hidden_layers": 1, "intermediate_size": 21504, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "hidden_act": "relu2",
    },
    aliases={
        "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act",
        "mamba_num_groups": "n_groups", "mamba_state_dim": "ssm_state_size",
        "mamba_conv_kernel": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    },
    also={
        "layer_types": LIST, "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel", "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    },
    gated=False,
    has_rope=False,
)  # fmt: skip
