"""What sets a model apart from Llama, in words."""

from __future__ import annotations

from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, MAMBA, MLP


def features(config: ModelConfig) -> list[str]:
    """One phrase for each feature, in the order of a forward."""
    found = [*_hybrid(config), *_positions(config), *_attention(config), *_norms(config)]
    found += _experts(config)
    if config.activation != "swiglu":
        found.append(f"activation {config.activation}")
    biased = {
        "queries, keys and values": config.qkv_bias,
        "the attention's output": config.attention_output_bias,
        "the MLP": config.mlp_bias,
    }
    if any(biased.values()):
        found.append(f"biases of {' and '.join(name for name, has in biased.items() if has)}")
    for name in ("embedding", "residual", "logit"):
        multiplier = getattr(config, f"{name}_multiplier")
        if multiplier != 1:
            found.append(f"{name} multiplier {multiplier:g}")
    if config.logit_soft_cap is not None:
        found.append(f"logits capped at {config.logit_soft_cap:g}")
    if config.tie_word_embeddings:
        found.append("tied embeddings")
    if config.mtp_num_layers:
        found.append(f"{config.mtp_num_layers} layers for multi-token prediction")
    return found


def _hybrid(config: ModelConfig) -> list[str]:
    if config.hybrid_override_pattern is None:
        return []
    kinds = {MAMBA: "Mamba-2", ATTENTION: "attention", MLP: "an MLP", EXPERTS: "experts"}
    counts = {name: len(config.layers_of(letter)) for letter, name in kinds.items()}
    parts = [f"{count} of {name}" for name, count in counts.items() if count]
    found = [f"layers of one part: {', '.join(parts)}"]
    if config.layers_of(MAMBA):
        sizes = config.mamba
        groups = f"{sizes.groups} group{'s' * (sizes.groups > 1)}"
        heads = f"{sizes.heads} heads of {sizes.head_dim} in {groups}"
        found.append(f"Mamba-2 of {heads}, states of {sizes.state_size}")
    return found


def _experts(config: ModelConfig) -> list[str]:
    if config.num_moe_experts is None:
        return []
    layers = config.expert_layer_count
    count = f"{config.num_moe_experts} experts of {config.moe_ffn_hidden_size}"
    where = f"in {layers} of {config.num_layers} layers"
    found = [f"{count} {where}, {config.moe_router_topk} a token by {_router(config)}"]
    if config.moe_router_num_groups is not None:
        kept, groups = config.moe_router_group_topk, config.moe_router_num_groups
        found.append(f"experts of {kept} of {groups} groups")
    if config.moe_shared_expert_intermediate_size is not None:
        gate = " behind a gate" if config.moe_shared_expert_gate else ""
        found.append(f"shared experts of {config.moe_shared_expert_intermediate_size}{gate}")
    if config.moe_latent_size is not None:
        found.append(f"experts of a projection of {config.moe_latent_size} elements")
    return found


def _router(config: ModelConfig) -> str:
    """How experts are weighted."""
    scores: str = config.moe_router_score_function
    if scores == "softmax":
        scores += " of all" if config.moe_router_pre_softmax else " of the chosen"
    if config.moe_router_enable_expert_bias:
        scores += " with a bias"
    factor = config.moe_router_topk_scaling_factor
    return scores if factor is None else f"{scores}, times {factor:g}"


def _positions(config: ModelConfig) -> list[str]:
    if config.position_embedding == "learned_absolute":
        return ["learned positions"]
    if config.position_embedding == "none":
        return ["no positions"] if config.layers_of(ATTENTION) else []
    found = []
    if config.rotary_fraction != 1:
        found.append(f"rotation of {config.rotary_dim} of {config.head_dim} elements of a head")
    if config.rope_scaling is not None:
        found.append(f"rope scaling {_scaling(config.rope_scaling)}")
    if config.nope_layers:
        found.append(f"no rotation in {len(config.nope_layers)} of {config.num_layers} layers")
    if config.sliding_rope_theta is not None:
        theta = f"theta {config.sliding_rope_theta:g} in layers with a window"
        found.append(f"{theta}, {config.rope_theta:g} in the others")
    if config.query_scaling_beta is not None:
        found.append("queries scaled by their position")
    return found


def _scaling(scaling: RopeScaling) -> str:
    return f"{scaling.kind} by {scaling.factor:g}"


def _attention(config: ModelConfig) -> list[str]:
    found = []
    latent = config.latent_attention
    if latent is not None:
        found.append(
            f"multi-latent attention, whose cache holds {latent.cached} elements a token and layer"
        )
    if config.sliding_window is not None:
        layers = sum(config.attention_window(n) is not None for n in range(config.num_layers))
        where = f"{layers} of {config.num_layers} layers"
        found.append(f"a window of {config.sliding_window} tokens in {where}")
    if config.attention_soft_cap is not None:
        found.append(f"attention scores capped at {config.attention_soft_cap:g}")
    if config.attention_sinks:
        found.append("attention sinks, a logit of each head")
    if config.attention_scale is not None:
        found.append(f"attention scale {config.attention_scale:g}")
    if config.qk_norm:
        kinds = {
            "head": "each head's query and key",
            "each_head": "each head's query and key, with weights of its own",
            "projection": "all queries and all keys of a token",
            "l2": "each head's query and key, without weights",
        }
        found.append(f"norms of {kinds[config.qk_norm_kind]}")
    return found


def _norms(config: ModelConfig) -> list[str]:
    found = []
    if config.normalization != "RMSNorm":
        found.append(config.normalization + ("" if config.norm_bias else " without bias"))
    if config.zero_centered_gamma:
        found.append("norms multiply by 1 + weight")
    if config.norm_placement != "pre":
        where = "behind" if config.norm_placement == "post" else "before and behind"
        found.append(f"norms {where} attention and MLP")
    if config.parallel_residual is not None:
        norms = "one norm" if config.parallel_residual == "one_norm" else "two norms"
        found.append(f"attention and MLP side by side behind {norms}")
    return found
