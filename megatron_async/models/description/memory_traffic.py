"""What a decode step has to read from memory, and its least time therefore."""

from __future__ import annotations

from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, MAMBA

MXFP4_BYTES = 0.5 + 1 / 32
"""What an element takes in MXFP4, its share of a scale included."""


def weight_bytes(
    config: ModelConfig,
    itemsize: int,
    experts: float | None = None,
    layer_itemsize: int | None = None,
    expert_itemsize: float | None = None,
) -> int:
    """Bytes of weights that one decode step reads, without drafts.

    All of the decoder and the output projection. Of an input embedding that is not the output
    projection too a step reads a row per request, which is nothing, and of learned positions
    likewise.

    Args:
        experts: how many of each layer's the step's tokens have chosen; None is all.
        layer_itemsize: bytes of an element of the decoder's layers, the few of norms and routers
            among them; None is ``itemsize``.
        expert_itemsize: of the weights of experts that are not shared, their scales included; None
            is as of others of a layer.
    """
    layers = sum(_layer_elements(config, layer, experts) for layer in range(config.num_layers))
    rest = _norm_elements(config) + config.vocab_size * config.hidden_size
    of_layers = layer_itemsize or itemsize
    read = of_layers * layers + itemsize * rest
    if expert_itemsize is not None:
        read += (expert_itemsize - of_layers) * _expert_elements(config, experts)
    return round(read)


def mtp_weight_bytes(
    config: ModelConfig,
    itemsize: int,
    experts: float | None = None,
    layer_itemsize: int | None = None,
) -> int:
    """Bytes of weights that a draft by multi-token prediction reads: a layer of its own, and the
    output projection once more."""
    hidden = config.hidden_size
    layer = _layer_elements(config, config.num_layers, experts)
    layer += 2 * hidden * hidden + 3 * _norm_elements(config)
    return round((layer_itemsize or itemsize) * layer + itemsize * config.vocab_size * hidden)


def expected_experts(config: ModelConfig, tokens: int) -> float | None:
    """Return the experts of a layer that ``tokens`` tokens choose, if all are chosen equally often
    and each token for itself; None without experts."""
    if config.num_moe_experts is None:
        return None
    share = config.moe_router_topk / config.num_moe_experts
    return config.num_moe_experts * (1 - (1 - share) ** tokens)


def _norm_elements(config: ModelConfig) -> int:
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return config.hidden_size * (2 if has_bias else 1)


def _layer_elements(config: ModelConfig, layer: int, experts: float | None) -> float:
    """Count the elements of a layer of the decoder, or of multi-token prediction behind them."""
    if config.hybrid_override_pattern is not None:
        kind = config.hybrid_override_pattern[layer]
        return _norm_elements(config) + _part_elements(config, kind, experts)
    norms = 4 if config.norm_placement == "both" else 2
    found = _attention_elements(config)
    found += (norms - (config.parallel_residual == "one_norm")) * _norm_elements(config)
    if config.has_experts(layer):
        return found + _expert_layer_elements(config, experts)
    return found + _dense_elements(config)


def _part_elements(config: ModelConfig, kind: str, experts: float | None) -> float:
    """Count the elements of a layer of a hybrid model, but for its norm."""
    if kind == MAMBA:
        return _mamba_elements(config)
    if kind == ATTENTION:
        return _attention_elements(config)
    return _expert_layer_elements(config, experts) if kind == EXPERTS else _dense_elements(config)


def _mamba_elements(config: ModelConfig) -> int:
    sizes, hidden = config.mamba, config.hidden_size
    found = hidden * (sizes.projection + sizes.inner) + sizes.inner + 3 * sizes.heads
    found += sizes.conv_channels * (sizes.conv_width + config.mamba_conv_bias)
    return found + (sizes.projection + hidden if config.mamba_proj_bias else 0)


def _dense_elements(config: ModelConfig) -> int:
    return _mlp_elements(config, config.hidden_size, config.ffn_hidden_size, config.mlp_bias)


def _attention_elements(config: ModelConfig) -> int:
    """Count the elements of a layer's attention, but for its norm."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.latent_attention
    query, key_value = heads * config.head_dim, config.num_kv_heads * config.head_dim
    if latent is not None:
        rank, direct = latent.kv_lora_rank, latent.q_lora_rank is None
        queries = hidden if direct else latent.q_lora_rank or 0
        found = queries * query + (0 if direct else queries * (hidden + 1))
        found += hidden * latent.cached + rank
        of_head = config.head_dim - latent.qk_pos_emb_head_dim + latent.v_head_dim
        found += hidden if config.attention_output_bias else 0
        return found + rank * heads * of_head + heads * latent.v_head_dim * hidden
    found = hidden * (query + 2 * key_value) + query * hidden
    if config.qk_norm:
        all_heads = config.qk_norm_kind in ("projection", "each_head")
        found += query + key_value if all_heads else 2 * config.head_dim
    found += heads if config.attention_sinks else 0
    found += hidden if config.attention_output_bias else 0
    return found + (query + 2 * key_value if config.qkv_bias else 0)


def _mlp_elements(config: ModelConfig, size: int, ffn: int, bias: bool) -> int:
    """Count the elements of an MLP from ``size`` elements to as many."""
    fc1_rows = 2 * ffn if config.gated else ffn
    return fc1_rows * size + size * ffn + (fc1_rows + size if bias else 0)


def _expert_layer_elements(config: ModelConfig, experts: float | None) -> float:
    """Count the elements of a router, ``experts`` of its experts, and what all tokens pass."""
    count, ffn, hidden = config.num_moe_experts, config.moe_ffn_hidden_size, config.hidden_size
    assert count is not None and ffn is not None
    latent, shared = config.moe_latent_size, config.moe_shared_expert_intermediate_size
    biases = config.moe_router_bias + config.moe_router_enable_expert_bias
    expert = _mlp_elements(config, latent or hidden, ffn, config.mlp_bias)
    found: float = count * (hidden + biases) + (count if experts is None else experts) * expert
    if latent is not None:
        found += 2 * hidden * latent + (hidden + latent if config.mlp_bias else 0)
    if shared is not None:
        found += _mlp_elements(config, hidden, shared, bias=False)
        found += hidden if config.moe_shared_expert_gate else 0
    return found


def _expert_elements(config: ModelConfig, experts: float | None) -> float:
    """Count the elements of weights of ``experts`` experts, which are not shared, in all layers."""
    count, ffn = config.num_moe_experts, config.moe_ffn_hidden_size
    if count is None or ffn is None:
        return 0
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    expert = _mlp_elements(config, config.moe_latent_size or config.hidden_size, ffn, bias=False)
    return layers * (count if experts is None else experts) * expert


def kv_bytes(
    config: ModelConfig, itemsize: int, batch_size: int, tokens: float, layers: int | None = None
) -> float:
    """Bytes of keys and values that attention of ``batch_size`` rows reads, each over ``tokens``
    tokens or a layer's window, in ``layers`` layers; None is all of the decoder."""
    row = 2 * config.num_kv_heads * config.head_dim * itemsize
    if config.latent_attention is not None:
        row = config.latent_attention.cached * itemsize
    windows = [config.attention_window(n) for n in config.layers_of(ATTENTION)]
    if layers is not None:
        windows = [None] * layers
    return batch_size * row * sum(min(tokens, window or tokens) for window in windows)


def state_bytes(config: ModelConfig, itemsize: int, state_itemsize: int = 4) -> int:
    """Bytes of recurrent state that a decode step reads and writes for each row: the sums, of
    ``state_itemsize`` bytes an element, and the last tokens' inputs."""
    sizes, layers = config.mamba, len(config.layers_of(MAMBA))
    sums = 2 * state_itemsize * sizes.heads * sizes.head_dim * sizes.state_size
    # The convolution reads the inputs of the tokens before, and one token's are written.
    inputs = itemsize * (sizes.conv_channels * (sizes.conv_width - 1) + sizes.input_width)
    return layers * (sums + inputs)


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
    experts: float | None = None,
    state_itemsize: int = 4,
    kv_itemsize: int | None = None,
    layer_itemsize: int | None = None,
    expert_itemsize: float | None = None,
    tensor: int = 1,
    expert: int = 1,
    pipeline: int = 1,
    micro_batches: int = 1,
) -> float:
    """Milliseconds in which memory could deliver a mean step's weights, keys and values once, and
    take recurrent states and give them back, at ``bandwidth`` bytes per second.

    Each of several ranks reads its share, at the same time. With pipeline stages a step is a turn
    of all micro-batches, each of which reads the weights of its stage.

    Args:
        drafts: a layer for multi-token prediction and the output layer are read this many times
            too, or all of ``draft_model``.
        experts: of each layer, those that a step has read; None takes what is to be expected of
            its tokens, see :func:`expected_experts`.
        state_itemsize: bytes of an element of recurrent states.
        kv_itemsize: bytes of an element of keys and values, of a draft model too; None is
            ``itemsize``.
        layer_itemsize, expert_itemsize: and of its layers, as :func:`weight_bytes` takes them.
        tensor, expert, pipeline, micro_batches: sizes of the layout.
    """
    load = batch_size, prompt_tokens + new_tokens / 2
    if experts is None:
        experts = expected_experts(config, batch_size // micro_batches * (1 + drafts))
    # Experts alone are spread further than tensor-parallel ranks.
    whole, of_all = (
        weight_bytes(config, itemsize, n, layer_itemsize, expert_itemsize) for n in (experts, 0.0)
    )
    weights = (of_all / tensor + (whole - of_all) / max(tensor, expert)) / pipeline
    kept = itemsize if kv_itemsize is None else kv_itemsize
    read = weights * micro_batches + kv_bytes(config, kept, *load) / (tensor * pipeline)
    read += batch_size * state_bytes(config, itemsize, state_itemsize)
    if drafts == 0:
        return 1e3 * read / bandwidth
    if draft_model is None:
        drafting = expected_experts(config, batch_size)
        kv = kv_bytes(config, kept, *load, layers=1)
        draft = kv + mtp_weight_bytes(config, itemsize, drafting, layer_itemsize)
    else:
        drafting = expected_experts(draft_model, batch_size)
        kv = kv_bytes(draft_model, kept, *load)
        draft = kv + weight_bytes(draft_model, itemsize, drafting)
    read += drafts * draft
    return 1e3 * read / bandwidth
