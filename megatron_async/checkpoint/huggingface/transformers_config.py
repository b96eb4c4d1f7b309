"""A model's architecture as transformers describes it: the way back from ``huggingface``."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_async.errors import ConfigError
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.sizes import ATTENTION, MAMBA, MLP


def transformers_config(config: ModelConfig) -> Any:
    """The same architecture as transformers has it.

    Raises:
        ConfigError: it has none that we know of.
    """
    import transformers

    names = ("vocab_size", "tie_word_embeddings")
    common: dict[str, Any] = {name: getattr(config, name) for name in names}
    if _differs(config, "learned_absolute") == _GPT2 and config.activation == "gelu_tanh":
        return transformers.GPT2Config(
            **common,
            n_positions=config.max_sequence_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_hidden_size,
            layer_norm_epsilon=config.norm_epsilon,
        )
    common |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": _rope(config),
    }
    if config.hybrid_override_pattern is not None:
        return _hybrid(config, common)
    differs = _differs(config, "rope")
    if differs is not None and config.num_moe_experts is not None:
        return _with_experts(config, common, differs - _EXPERTS)
    if differs == set():
        return transformers.LlamaConfig(**common)
    if differs == {"qk_norm"}:
        return transformers.Qwen3Config(**common)
    if differs == {"qkv_bias"}:
        return transformers.Qwen2Config(**common)
    if differs == {"sliding_window"}:  # Phi-3 too, which stores the same parameters otherwise
        return transformers.MistralConfig(**common, sliding_window=config.sliding_window)
    if differs == _GEMMA2 and config.activation == "geglu_tanh" and config.attention_scale:
        layers = range(config.num_layers)
        kinds = {True: "full_attention", False: "sliding_attention"}
        return transformers.Gemma2Config(
            **common,
            query_pre_attn_scalar=round(config.attention_scale**-2),
            attn_logit_softcapping=config.attention_soft_cap,
            final_logit_softcapping=config.logit_soft_cap,
            sliding_window=config.sliding_window,
            layer_types=[kinds[config.attention_window(n) is None] for n in layers],
        )
    raise ConfigError("transformers has no counterpart of this architecture that we know of")


def _hybrid(config: ModelConfig, common: dict[str, Any]) -> Any:
    """Convert a model of Mamba-2, attention and MLPs in layers of their own: Nemotron-H."""
    import transformers

    differs = _differs(config, "none")
    nemotron = getattr(transformers, "NemotronHConfig", None)  # since transformers 5
    if differs != {"activation", "hybrid_override_pattern"} or nemotron is None:
        raise ConfigError("transformers has no counterpart of this hybrid model that we know of")
    letters = {MAMBA: "linear_attention", ATTENTION: "full_attention", MLP: "mlp"}
    sizes = config.mamba
    return nemotron(
        **{name: value for name, value in common.items() if name not in _NOT_NEMOTRON},
        layers_block_type=[letters[kind] for kind in config.hybrid_override_pattern or ""],
        layer_norm_epsilon=config.norm_epsilon,
        mamba_num_heads=sizes.heads,
        mamba_head_dim=sizes.head_dim,
        n_groups=sizes.groups,
        ssm_state_size=sizes.state_size,
        conv_kernel=sizes.conv_width,
    )


def _with_experts(config: ModelConfig, common: dict[str, Any], differs: set[str]) -> Any:
    """Convert a model with experts that a softmax weights; ``differs`` are its other features."""
    import transformers

    kinds = config.moe_layer_freq or ()
    common["num_experts_per_tok"] = config.moe_router_topk
    qwen = {
        "num_experts": config.num_moe_experts,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "mlp_only_layers": [n for n, kind in enumerate(kinds) if not kind],
    }
    if differs == {"qk_norm"}:
        return transformers.Qwen3MoeConfig(**common, **qwen)
    if differs == {"qkv_bias", *_SHARED} and config.moe_shared_expert_gate:
        shared = config.moe_shared_expert_intermediate_size
        return transformers.Qwen2MoeConfig(**common, **qwen, shared_expert_intermediate_size=shared)
    if not kinds:
        common["intermediate_size"] = config.moe_ffn_hidden_size
        if differs <= {"sliding_window"} and not config.moe_router_pre_softmax:
            return transformers.MixtralConfig(
                **common, num_local_experts=config.num_moe_experts,
                sliding_window=config.sliding_window,
            )  # fmt: skip
        if differs == {"qk_norm", "qk_norm_kind"} and config.qk_norm_kind == "projection":
            return transformers.OlmoeConfig(
                **common, num_experts=config.num_moe_experts, pad_token_id=None,
                norm_topk_prob=qwen["norm_topk_prob"],
            )  # fmt: skip
    raise ConfigError("transformers has no counterpart of this architecture that we know of")


_EXPERTS = {
    "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_router_pre_softmax",
}  # fmt: skip
_SHARED = {"moe_shared_expert_intermediate_size", "moe_shared_expert_gate"}
_NOT_NEMOTRON = ("num_hidden_layers", "rms_norm_eps", "rope_parameters")
_SIZES = {
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "vocab_size",
    "ffn_hidden_size", "max_sequence_length", "norm_epsilon", "tie_word_embeddings",
    "position_embedding", "rope_theta", "rope_scaling", "mtp_num_layers", "mamba_state_dim",
    "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_conv_kernel",
}  # fmt: skip
_GPT2 = {"normalization", "activation", "qkv_bias", "attention_output_bias", "mlp_bias"}
_GEMMA2 = {
    "zero_centered_gamma", "norm_placement", "activation", "attention_scale", "logit_soft_cap",
    "attention_soft_cap", "sliding_window", "sliding_layers", "embedding_multiplier",
}  # fmt: skip


def _differs(config: ModelConfig, position_embedding: str) -> set[str] | None:
    """Features of the model that Llama does not have; None if its positions are others."""
    if config.position_embedding != position_embedding:
        return None
    return {
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _SIZES and getattr(config, field.name) != field.default
    }


def _rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    names = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
                 "beta_slow", "truncate"),
        "longrope": ("factor", "original_max_position_embeddings", "attention_factor",
                     "short_factor", "long_factor"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor",
                   "high_freq_factor"),
    }  # fmt: skip
    rope = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    return rope | {name: getattr(scaling, name) for name in names[scaling.kind]}
