"""DeepSeek-V2 and V2-Lite: multi-latent attention, dense layers first, then experts."""

from __future__ import annotations

import math
from typing import Any

from megatron_async.checkpoint.huggingface.expert_weights import ExpertNames
from megatron_async.checkpoint.huggingface.family import Family, Names, expert_fields, layer_count
from megatron_async.checkpoint.huggingface.rope_fields import given_rope, rope_kind
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.description.latent_config import LatentAttention


def config(fields: Fields) -> dict[str, Any]:
    rotated = fields.read("qk_rope_head_dim", int)
    head_dim = rotated + fields.read("qk_nope_head_dim", int)
    return {
        **_experts(fields),
        "num_kv_heads": fields.read("num_attention_heads", int),
        "head_dim": head_dim,
        "attention_scale": _mscale(fields) ** 2 / math.sqrt(max(head_dim, 1)),
        "latent_attention": LatentAttention(
            kv_lora_rank=fields.read("kv_lora_rank", int),
            q_lora_rank=fields.optional("q_lora_rank", int),
            qk_pos_emb_head_dim=rotated,
            v_head_dim=fields.read("v_head_dim", int),
            norm_epsilon=1e-6,
        ),
    }


def _mscale(fields: Fields) -> float:
    """Return the scale of queries and keys each, beside the factor of their rotations."""
    rope = given_rope(fields)
    is_plain = rope_kind(rope) == "default"
    share, factor = rope.unless_zero("mscale_all_dim", float), rope.read("factor", float, 1.0)
    return 1.0 if is_plain or not share or factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _experts(fields: Fields) -> dict[str, Any]:
    found = {
        **expert_fields(fields),
        "moe_ffn_hidden_size": (size := fields.read("moe_intermediate_size", int)),
        "moe_shared_expert_intermediate_size": fields.read("n_shared_experts", int) * size or None,
        "moe_router_topk_scaling_factor": fields.read("routed_scaling_factor", float),
    }
    dense, layers = fields.read("first_k_dense_replace", int), layer_count(fields)
    found["moe_layer_freq"] = tuple(int(layer >= dense) for layer in range(layers))
    method = fields.get("topk_method")
    if method == "group_limited_greedy":
        found["moe_router_num_groups"] = fields.read("n_group", int)
        found["moe_router_group_topk"] = fields.read("topk_group", int)
        found["moe_router_group_max"] = True
    elif method != "greedy":
        raise fields.unsupported("topk_method", "greedy, group_limited_greedy")
    return found


SHARED = "mlp.shared_experts."
EXPERTS = ExpertNames(
    shared_fc1=(f"{SHARED}gate_proj", f"{SHARED}up_proj"), shared_fc2=f"{SHARED}down_proj"
)
FAMILY = Family(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM",
    config=config,
    names=Names(experts=EXPERTS),
    defaults={
        "head_dim": 64, "intermediate_size": 11008, "first_k_dense_replace": 0,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "moe_intermediate_size": 1407,
    },
    aliases={"num_experts": "n_routed_experts"},
    also={"num_experts": "n_routed_experts"},
)  # fmt: skip
