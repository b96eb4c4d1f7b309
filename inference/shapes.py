"""Shapes of well-known models for ``bench``, with random weights, and what they have to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_async.models.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    import torch

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_sequence_length": 131072,
    "rope_theta": 500000.0,
}
_QWEN_3: dict[str, Any] = {
    "vocab_size": 151936,
    "max_sequence_length": 40960,
    "norm_epsilon": 1e-6,
    "qk_norm": True,
    "rope_theta": 1000000.0,
}


def _llama_scaling(factor: float) -> RopeScaling:
    return RopeScaling(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


SHAPES: dict[str, ModelConfig] = {
    # Llama-3.1-8B, Llama-3.2-1B and -3B
    "llama8b": ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=14336,
        rope_scaling=_llama_scaling(8.0),
        **_LLAMA_3,
    ),
    "llama1b": ModelConfig(
        num_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_hidden_size=8192,
        tie_word_embeddings=True,
        rope_scaling=_llama_scaling(32.0),
        **_LLAMA_3,
    ),
    "llama3b": ModelConfig(
        num_layers=28,
        hidden_size=3072,
        num_attention_heads=24,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=8192,
        tie_word_embeddings=True,
        rope_scaling=_llama_scaling(32.0),
        **_LLAMA_3,
    ),
    # Qwen3
    "qwen0.6b": ModelConfig(
        num_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=3072,
        tie_word_embeddings=True,
        **_QWEN_3,
    ),
    "qwen1.7b": ModelConfig(
        num_layers=28,
        hidden_size=2048,
        num_attention_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=6144,
        tie_word_embeddings=True,
        **_QWEN_3,
    ),
    "qwen4b": ModelConfig(
        num_layers=36,
        hidden_size=2560,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=9728,
        tie_word_embeddings=True,
        **_QWEN_3,
    ),
    "qwen8b": ModelConfig(
        num_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=12288,
        **_QWEN_3,
    ),
    # GPT-2 124M
    "gpt2": ModelConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_kv_heads=12,
        head_dim=64,
        ffn_hidden_size=3072,
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
    # No model's: small enough for tests on a CPU.
    "tiny-llama": ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=512,
        max_sequence_length=2048,
    ),
}


def build_shape(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Any:
    """A megatron-core ``GPTModel`` in evaluation mode with random weights, drawn where they stay.

    Products draw from a normal distribution of standard deviation 0.02 (those that end a residual
    branch from a narrower one), so activations stay finite in bfloat16 at any depth.
    """
    import torch

    from megatron_async.models.build import build_model

    torch.manual_seed(seed)
    model = build_model(config, device=device, dtype=dtype, initialize=True)
    return model.eval().requires_grad_(False)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that one decode step reads.

    All of the decoder and the output projection. Of an input embedding that is not the output
    projection too a step reads a row per request, which is nothing, and of learned positions
    likewise; layers of multi-token prediction are not run.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    fc1_rows = 2 * ffn if config.activation == "swiglu" else ffn
    norm = 2 * hidden if config.normalization == "LayerNorm" else hidden
    layer = hidden * (query + 2 * key_value) + query * hidden + fc1_rows * hidden + hidden * ffn
    layer += 2 * norm
    layer += 2 * config.head_dim if config.qk_norm else 0
    layer += query + 2 * key_value if config.qkv_bias else 0
    layer += hidden if config.attention_output_bias else 0
    layer += fc1_rows + hidden if config.mlp_bias else 0
    return itemsize * (config.num_layers * layer + norm + config.vocab_size * hidden)


def kv_bytes(config: ModelConfig, itemsize: int, tokens: float) -> float:
    """Bytes of keys and values that attention over ``tokens`` tokens reads, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize * tokens


def floor_ms(
    config: ModelConfig,
    itemsize: int,
    bandwidth: float,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
) -> float:
    """Milliseconds in which memory could deliver a mean step's weights, keys and values once, at
    ``bandwidth`` bytes per second."""
    mean_context = prompt_tokens + new_tokens / 2
    read = weight_bytes(config, itemsize) + kv_bytes(config, itemsize, batch_size * mean_context)
    return 1e3 * read / bandwidth
