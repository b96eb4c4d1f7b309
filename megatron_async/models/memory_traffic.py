"""What a decode step has to read from memory, and its least time therefore."""

from __future__ import annotations

from megatron_async.models.config import ModelConfig


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
