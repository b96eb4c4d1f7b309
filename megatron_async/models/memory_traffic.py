"""What a decode step has to read from memory, and its least time therefore."""

from __future__ import annotations

from megatron_async.models.config import ModelConfig


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that one decode step reads, without drafts.

    All of the decoder and the output projection. Of an input embedding that is not the output
    projection too a step reads a row per request, which is nothing, and of learned positions
    likewise.
    """
    layers = config.num_layers * _layer_elements(config) + _norm_elements(config)
    return itemsize * (layers + config.vocab_size * config.hidden_size)


def mtp_weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a draft by multi-token prediction reads: a layer of its own, and the
    output projection once more."""
    hidden = config.hidden_size
    layer = _layer_elements(config) + 2 * hidden * hidden + 3 * _norm_elements(config)
    return itemsize * (layer + config.vocab_size * hidden)


def _norm_elements(config: ModelConfig) -> int:
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return config.hidden_size * (2 if has_bias else 1)


def _layer_elements(config: ModelConfig) -> int:
    """Of a layer of the decoder."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    fc1_rows = 2 * ffn if config.gated else ffn
    layer = hidden * (query + 2 * key_value) + query * hidden + fc1_rows * hidden + hidden * ffn
    norms = 4 if config.norm_placement == "both" else 2
    layer += (norms - (config.parallel_residual == "one_norm")) * _norm_elements(config)
    if config.qk_norm:
        all_heads = config.qk_norm_kind in ("projection", "each_head")
        layer += query + key_value if all_heads else 2 * config.head_dim
    layer += query + 2 * key_value if config.qkv_bias else 0
    layer += hidden if config.attention_output_bias else 0
    layer += fc1_rows + hidden if config.mlp_bias else 0
    return layer


def kv_bytes(
    config: ModelConfig, itemsize: int, batch_size: int, tokens: float, layers: int | None = None
) -> float:
    """Bytes of keys and values that attention of ``batch_size`` rows reads, each over ``tokens``
    tokens or a layer's window, in so many layers; None is all of the decoder."""
    row = 2 * config.num_kv_heads * config.head_dim * itemsize
    windows = [config.attention_window(n) for n in range(config.num_layers)]
    if layers is not None:
        windows = [None] * layers
    return batch_size * row * sum(min(tokens, window or tokens) for window in windows)


def floor_ms(
    config: ModelConfig,
    itemsize: int,
    bandwidth: float,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
    drafts: int = 0,
    draft_model: ModelConfig | None = None,
) -> float:
    """Milliseconds in which memory could deliver a mean step's weights, keys and values once, at
    ``bandwidth`` bytes per second.

    Args:
        drafts: so many times a layer for multi-token prediction and the output layer are read too,
            or all of ``draft_model``.
    """
    load = batch_size, prompt_tokens + new_tokens / 2
    read = weight_bytes(config, itemsize) + kv_bytes(config, itemsize, *load)
    if draft_model is None:
        draft = mtp_weight_bytes(config, itemsize) + kv_bytes(config, itemsize, *load, layers=1)
    else:
        draft = weight_bytes(draft_model, itemsize) + kv_bytes(draft_model, itemsize, *load)
    read += drafts * draft
    return 1e3 * read / bandwidth
