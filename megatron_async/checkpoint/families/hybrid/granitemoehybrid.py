"""Granite 4: Mamba-2 or attention, then an MLP or experts, in each layer; Granite's multipliers."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.hybrid.bamba import MAMBA_ALIASES, MAMBA_DEFAULTS
from megatron_async.checkpoint.families.llama_like.granite import config as granite
from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.family import Family, Names, layer_count
from megatron_async.checkpoint.huggingface.hybrid_fields import (
    letters,
    mamba_fields,
    pattern_fields,
)
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.mamba.sizes import EXPERTS, MAMBA, MLP


def config(fields: Fields) -> dict[str, Any]:
    count = fields.optional("num_local_experts", int) or 0
    mixers = letters(fields, "layer_types", layer_count(fields), MAMBA)
    size = fields.read("shared_intermediate_size", int)
    found = {
        **granite(fields),
        **mamba_fields(fields, expanded=True),
        **pattern_fields("".join(kind + (EXPERTS if count else MLP) for kind in mixers)),
        "attention_output_bias": fields.read("attention_bias", bool, False),
        "mlp_bias": False,
    }
    if fields.optional("position_embedding_type", str) != "rope":
        found["position_embedding"] = "none"
    if count == 0:
        return {**found, "ffn_hidden_size": size}
    return {
        **found,
        "num_moe_experts": count,
        "moe_router_topk": fields.read("num_experts_per_tok", int, 2),
        "moe_ffn_hidden_size": fields.read("intermediate_size", int),
        "moe_shared_expert_intermediate_size": size,
    }


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    config=config,
    names=Names(
        fc1=("shared_mlp.input_linear",),
        fc2="shared_mlp.output_linear",
        parts=2,
        in_memory=(
            ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
            ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
            ("block_sparse_moe.router.layer.", "block_sparse_moe.router."),
        ),
        experts=ExpertNames(
            router="block_sparse_moe.router.layer",
            stacked="block_sparse_moe.",
            stacked_fc1="input_linear.weight",
            stacked_fc2="output_linear.weight",
            stacked_router="block_sparse_moe.router.layer",
            shared_fc1=("shared_mlp.input_linear",),
            shared_fc2="shared_mlp.output_linear",
        ),
    ),
    defaults={
        "intermediate_size": 11008,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        **MAMBA_DEFAULTS,
    },
    aliases=MAMBA_ALIASES,
    also={"layers_block_type": "layer_types"},
)
