"""Shapes of well-known models, for random weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.models.description.latent_config import LatentAttention


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, **others: Any
) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        **others,
    )


def _llama(*sizes: int, rope_factor: float, tied: bool) -> ModelConfig:
    """Llama 3.1 and 3.2."""
    scaling = RopeScaling(
        factor=rope_factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return _shape(
        *sizes,
        vocab_size=128256,
        max_sequence_length=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
    )


def _qwen(*sizes: int, tied: bool) -> ModelConfig:
    """Qwen3."""
    return _shape(
        *sizes,
        vocab_size=151936,
        max_sequence_length=40960,
        norm_epsilon=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, ModelConfig] = {
    # layers, hidden size, heads, KV heads, head dimension, FFN hidden size
    "llama8b": _llama(32, 4096, 32, 8, 128, 14336, rope_factor=8.0, tied=False),
    "llama1b": _llama(16, 2048, 32, 8, 64, 8192, rope_factor=32.0, tied=True),
    "llama3b": _llama(28, 3072, 24, 8, 128, 8192, rope_factor=32.0, tied=True),
    "qwen0.6b": _qwen(28, 1024, 16, 8, 128, 3072, tied=True),
    "qwen1.7b": _qwen(28, 2048, 16, 8, 128, 6144, tied=True),
    "qwen4b": _qwen(36, 2560, 32, 8, 128, 9728, tied=True),
    "qwen8b": _qwen(36, 4096, 32, 8, 128, 12288, tied=False),
    "qwen3-30b-a3b": dataclasses.replace(
        _qwen(48, 2048, 32, 4, 128, 6144, tied=False),
        num_moe_experts=128,
        moe_ffn_hidden_size=768,
        moe_router_topk=8,
    ),
    "deepseek-v2-lite": _shape(
        *(27, 2048, 16, 16, 192, 10944),
        vocab_size=102400,
        max_sequence_length=163840,
        norm_epsilon=1e-6,
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_max_position_embeddings=4096),
        attention_scale=(0.1 * 0.707 * math.log(40.0) + 1.0) ** 2 / math.sqrt(192),
        latent_attention=LatentAttention(
            kv_lora_rank=512, qk_pos_emb_head_dim=64, v_head_dim=128, norm_epsilon=1e-6
        ),
        num_moe_experts=64,
        moe_layer_freq=(0, *(1,) * 26),
        moe_ffn_hidden_size=1408,
        moe_router_topk=6,
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=2816,
    ),
    "gpt-oss-20b": _shape(
        *(24, 2880, 64, 8, 64, 2880),
        vocab_size=201088,
        max_sequence_length=131072,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        attention_sinks=True,
        sliding_window=128,
        sliding_layers=tuple(range(0, 24, 2)),
        rope_theta=150000.0,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            attention_factor=0.1 * math.log(32.0) + 1.0,
            truncate=False,
        ),
        activation="clamped_swiglu",
        activation_limit=7.0,
        num_moe_experts=32,
        moe_ffn_hidden_size=2880,
        moe_router_topk=4,
        moe_router_bias=True,
    ),
    "qwen2.5-7b": _shape(
        *(28, 3584, 28, 4, 128, 18944),
        vocab_size=152064,
        max_sequence_length=32768,
        norm_epsilon=1e-6,
        qkv_bias=True,
        rope_theta=1000000.0,
    ),
    # Mistral 7B v0.1
    "mistral7b": _shape(
        *(32, 4096, 32, 8, 128, 14336),
        vocab_size=32000,
        max_sequence_length=32768,
        sliding_window=4096,
    ),
    # Phi-3 mini, of 4k tokens
    "phi3-mini": _shape(
        *(32, 3072, 32, 32, 96, 8192),
        vocab_size=32064,
        max_sequence_length=4096,
        sliding_window=2047,
    ),
    "gemma2-9b": _shape(
        *(42, 3584, 16, 8, 256, 14336),
        vocab_size=256000,
        max_sequence_length=8192,
        norm_epsilon=1e-6,
        zero_centered_gamma=True,
        norm_placement="both",
        activation="geglu_tanh",
        tie_word_embeddings=True,
        attention_scale=256**-0.5,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        sliding_window=4096,
        sliding_layers=tuple(range(0, 42, 2)),
        embedding_multiplier=3584**0.5,
    ),
    # GPT-2 124M
    "gpt2": _shape(
        *(12, 768, 12, 12, 64, 3072),
        vocab_size=50257,
        max_sequence_length=1024,
        normalization="LayerNorm",
        activation="gelu_tanh",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        position_embedding="learned_absolute",
    ),
    "nemotron-h-8b": _shape(
        *(52, 4096, 32, 8, 128, 21504),
        vocab_size=131072,
        max_sequence_length=8192,
        activation="squared_relu",
        position_embedding="none",
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_num_heads=128,
    ),
    # No model's: small enough for tests on a CPU.
    "tiny-llama": _shape(2, 64, 4, 2, 16, 128, vocab_size=512, max_sequence_length=2048),
    "tiny-qwen-moe": _shape(
        *(2, 64, 4, 2, 16, 128),
        vocab_size=512,
        max_sequence_length=2048,
        qk_norm=True,
        num_moe_experts=8,
        moe_ffn_hidden_size=32,
        moe_router_topk=2,
    ),
    "tiny-nemotron-h": _shape(
        *(5, 64, 4, 2, 16, 128),
        vocab_size=512,
        max_sequence_length=2048,
        activation="squared_relu",
        position_embedding="none",
        hybrid_override_pattern="M-M*-",
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=16,
    ),
}


PUBLISHED_AS_MXFP4 = ("gpt-oss-20b",)
"""Shapes of models whose experts are published so."""


def kept_of_shape(name: str, quantization: str | None) -> dict[str, bool]:
    """What a model with random weights keeps, as ``build_random_model`` takes it: what the
    published model would, for a name in :data:`SHAPES` or ``random:`` and one.

    Args:
        quantization: as ``EngineConfig`` says it.
    """
    packs = quantization == "mxfp4" or name.removeprefix("random:") in PUBLISHED_AS_MXFP4
    return {"quantize": quantization == "fp8", "pack": quantization is not None and packs}
