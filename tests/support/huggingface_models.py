"""Tiny random models of each type that transformers and this package know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
    initializer_range=0.3,
)
GPT2_SIZES: dict[str, Any] = dict(
    n_embd=64,
    n_layer=2,
    n_head=4,
    vocab_size=VOCAB_SIZE,
    n_positions=256,
    eos_token_id=None,
    bos_token_id=None,
    initializer_range=0.3,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}
MINISTRAL3 = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA = dict(head_dim=16, sliding_window=20, query_pre_attn_scalar=20)

LATENT = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
DEEPSEEK_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)


def _of(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**SIZES, **changes})


MAMBA2: dict[str, Any] = dict(
    num_heads=8, head_dim=16, state_size=16, n_groups=2, expand=2, layer_norm_epsilon=1e-4
)
BAMBA: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_state=16, mamba_n_groups=2)
NEMOTRON_H: dict[str, Any] = dict(
    head_dim=16, mamba_num_heads=8, mamba_head_dim=12, ssm_state_size=16, n_groups=2,
    # transformers clamps steps to it in prompts alone, and the published model nowhere.
    time_step_min=1e-30,
)  # fmt: skip
NEMOTRON_EXPERTS: dict[str, Any] = dict(
    n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.5,
    moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
)  # fmt: skip
GRANITE4: dict[str, Any] = dict(
    **BAMBA, shared_intermediate_size=80, embedding_multiplier=3.0, logits_scaling=2.0,
    residual_multiplier=0.7, attention_multiplier=0.2,
)  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _of("Llama"),
    "llama-llama3-rope": _of("Llama", rope_parameters=LLAMA3),
    "mistral-window": _of("Mistral", sliding_window=20),
    "mistral-head-dim": _of("Mistral", sliding_window=None, head_dim=32),
    "ministral": _of(
        "Ministral",
        sliding_window=20,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "ministral3": _of("Ministral3", head_dim=16, rope_parameters=MINISTRAL3),
    "phi3": _of("Phi3", sliding_window=30),
    "phi3-longrope": _of("Phi3", original_max_position_embeddings=48, rope_parameters=LONGROPE),
    "phi3-partial": _of(
        "Phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "qwen2": _of("Qwen2", tie_word_embeddings=True),
    "qwen2-yarn": _of("Qwen2", rope_parameters=YARN),
    "qwen2-window": _of("Qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": _of("Qwen3", head_dim=32),
    "qwen3-linear": _of(
        "Qwen3", head_dim=32, rope_parameters={"rope_type": "linear", "factor": 2.0}
    ),
    "qwen3-dynamic": _of(
        "Qwen3",
        head_dim=32,
        max_position_embeddings=80,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0},
    ),
    "gemma2": _of("Gemma2", **GEMMA, final_logit_softcapping=10.0, attn_logit_softcapping=5.0),
    "gemma3": _of("Gemma3Text", **GEMMA, sliding_window_pattern=2),
    "gemma3-linear": _of(
        "Gemma3Text",
        **GEMMA,
        sliding_window_pattern=2,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=9.0,
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZES),
    "gpt_neox": _of("GPTNeoX"),
    "gpt_neox-sequential": _of("GPTNeoX", use_parallel_residual=False, attention_bias=False),
    "olmo2": _of("Olmo2"),
    "granite": _of(
        "Granite",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
    ),
    "smollm3": _of("SmolLM3", num_hidden_layers=3, no_rope_layer_interval=2),
    "starcoder2": _of("Starcoder2", sliding_window=25),
    "cohere": _of("Cohere", logit_scale=0.3),
    "cohere-qk-norm": _of("Cohere", logit_scale=3.0, use_qk_norm=True),
    "glm4": _of("Glm4", head_dim=16),
    "glm": _of("Glm", head_dim=16),
    "helium": _of("Helium", head_dim=16),
    "mamba2": _of("Mamba2", **MAMBA2),
    "bamba": _of("Bamba", **BAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "nemotron_h": _of(
        "NemotronH",
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    ),
    "nemotron_h-experts": _of(
        "NemotronH",
        **NEMOTRON_H,
        **NEMOTRON_EXPERTS,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "nemotron_h-latent": _of(
        "NemotronH",
        **{**NEMOTRON_H, **NEMOTRON_EXPERTS, "n_group": 1, "topk_group": 1},
        moe_latent_size=32,
        layers_block_type=["linear_attention", "moe", "full_attention"],
    ),
    "granitemoehybrid": _of(
        "GraniteMoeHybrid",
        **GRANITE4,
        num_local_experts=0,
        layer_types=["linear_attention", "full_attention"],
    ),
    "granitemoehybrid-experts": _of(
        "GraniteMoeHybrid",
        **GRANITE4,
        num_local_experts=8,
        num_experts_per_tok=3,
        position_embedding_type="rope",
        layer_types=["linear_attention", "full_attention"],
    ),
    "deepseek_v2": _of(
        "DeepseekV2",
        **LATENT,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v2-groups": _of(
        "DeepseekV2",
        **{**LATENT, "q_lora_rank": 24},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        rms_norm_eps=1e-5,
    ),
    "gpt_oss": _of(
        "GptOss",
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=20,
        swiglu_limit=1.5,
        rope_parameters={**YARN, "truncate": False},
    ),
    "mixtral": _of("Mixtral", sliding_window=25, num_local_experts=4),
    "olmoe": _of("Olmoe", num_experts=8, num_experts_per_tok=3),
    "qwen2_moe": _of(
        "Qwen2Moe",
        **EXPERTS,
        shared_expert_intermediate_size=40,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
        decoder_sparse_step=2,
    ),
    "qwen3_moe": _of(
        "Qwen3Moe",
        **EXPERTS,
        head_dim=32,
        norm_topk_prob=True,
        num_hidden_layers=3,
        mlp_only_layers=[1],
    ),
}


def random_model(name: str, **changes: Any) -> Any:
    """A model of :data:`CONFIGS` in evaluation mode, with ``changes`` of its config; norms and
    biases are random too."""
    torch.manual_seed(5)
    config = CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    # transformers' other kernels leave soft caps out.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    # Some types take None for their own default ids, of a larger vocabulary.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with torch.no_grad():
        if name.startswith("gemma"):  # else a token's own embedding decides on the next one
            model.get_input_embeddings().weight.mul_(0.05)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model
