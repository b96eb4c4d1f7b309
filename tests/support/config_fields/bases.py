"""A small ``config.json`` of each type, in the words of its authors' files."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

LONGEST = 48
"""``max_position_embeddings``: prompts go up to twice as many tokens."""
WINDOW = 12

COMMON: Values = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEAD: Values = {"head_dim": 8}
SLIDING: Values = {"sliding_window": WINDOW}
EXPERTS: Values = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: Values = {**HEAD, **SLIDING, "query_pre_attn_scalar": 12}
MAMBA: Values = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2}
GRANITE: Values = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
QWEN_WINDOW: Values = {"use_sliding_window": True, **SLIDING, "max_window_layers": 1}
SCALED_QUERIES: Values = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4,
}

BASES: dict[str, Values] = {
    "bamba": {"rms_norm_eps": 1e-3, **COMMON, **MAMBA, "attn_layer_indices": [1]},
    "cohere": COMMON,
    "deepseek_v2": {
        **COMMON, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    },
    "gemma2": {**COMMON, **GEMMA},
    "gemma3_text": {**COMMON, **GEMMA, "layer_types": KINDS},
    "glm": {**COMMON, "head_dim": 16},
    "glm4": {**COMMON, "head_dim": 16},
    "gpt2": {
        "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LONGEST,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gpt_neox": {**COMMON, "rotary_pct": 0.5},
    "gpt_oss": {
        **COMMON, **HEAD, **SLIDING, "num_local_experts": 6, "num_experts_per_tok": 2,
    },
    "granite": {**COMMON, **GRANITE},
    "granitemoehybrid": {
        "rms_norm_eps": 1e-3,
        **COMMON, **MAMBA, **GRANITE, "num_local_experts": 4, "shared_intermediate_size": 24,
        "position_embedding_type": "rope", "layer_types": ["mamba", "attention", "mamba"],
    },
    "helium": {**COMMON, **HEAD},
    "llama": COMMON,
    "mamba2": {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8,
        "state_size": 8, "n_groups": 2, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,
    },
    "ministral": {**COMMON, **HEAD, **SLIDING, "layer_types": KINDS},
    "ministral3": {**COMMON, **HEAD, "rope_parameters": SCALED_QUERIES},
    "mistral": {**COMMON, **SLIDING},
    "mixtral": {**COMMON, **SLIDING, "num_local_experts": 4},
    "nemotron_h": {
        **COMMON, **HEAD, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24, "time_step_min": 1e-30,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    },
    "olmo2": COMMON,
    "olmoe": {**COMMON, "num_experts": 6, "num_experts_per_tok": 2},
    "phi3": {**COMMON, "original_max_position_embeddings": 24},
    "qwen2": {**COMMON, **QWEN_WINDOW},
    "qwen2_moe": {**COMMON, **EXPERTS, **QWEN_WINDOW, "shared_expert_intermediate_size": 24},
    "qwen3": {**COMMON, **HEAD, **QWEN_WINDOW},
    "qwen3_moe": {**COMMON, **EXPERTS, **HEAD, "use_sliding_window": True, **SLIDING},
    "smollm3": {**COMMON, "no_rope_layer_interval": 2},
    "starcoder2": {**COMMON, **SLIDING},
}  # fmt: skip
