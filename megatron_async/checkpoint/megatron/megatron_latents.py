"""Multi-latent attention of a model from the arguments of training (since core_v0.16)."""

from __future__ import annotations

import math
from typing import Any

from megatron_async.checkpoint.megatron.megatron_experts import Arguments
from megatron_async.models.description.config import RopeScaling
from megatron_async.models.description.latent_config import LatentAttention

_SIZES = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}


def latent_fields(args: Arguments) -> dict[str, Any]:
    """Fields of ``ModelConfig`` of a model with multi-latent attention; none without.

    What is absent is as in megatron's ``MLATransformerConfig``, but for ``q_lora_rank``: without it
    queries are projected directly.

    Raises:
        CheckpointError: an argument asks for what is not supported.
    """
    if not args.flag("multi_latent_attention"):
        return {}
    if not args.flag("qk_layernorm"):
        raise args.unsupported("qk_layernorm", "True with multi_latent_attention: norms of latents")
    if args.number("rotary_percent", 1.0) != 1:
        raise args.unsupported("rotary_percent", "1.0 with multi_latent_attention")
    sizes = {name: args.integer(name, size) for name, size in _SIZES.items()}
    rank = args.integer("q_lora_rank") if args.has("q_lora_rank") else None
    head_dim = args.integer("qk_head_dim", 128) + sizes["qk_pos_emb_head_dim"]
    factor = args.number("rotary_scaling_factor", 40.0)
    of_all = _mscale(factor, args.number("mscale_all_dim", 0.0))
    kind = args.word("rope_type", "yarn")
    if kind not in ("yarn", "rope"):
        raise args.unsupported("rope_type", "yarn, rope")
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=args.integer("original_max_position_embeddings", 4096),
        beta_fast=args.number("beta_fast", 32.0),
        beta_slow=args.number("beta_slow", 1.0),
        attention_factor=_mscale(factor, args.number("mscale", 1.0)) / of_all,
    )
    return {
        "num_kv_heads": args.integer("num_attention_heads"),
        "head_dim": head_dim,
        "qk_norm": False,
        "qkv_bias": False,
        "position_embedding": "rope",
        "rope_scaling": scaling if kind == "yarn" else None,
        "attention_scale": of_all**2 / math.sqrt(max(head_dim, 1)),
        "latent_attention": LatentAttention(**sizes, q_lora_rank=rank),
    }


def _mscale(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0
