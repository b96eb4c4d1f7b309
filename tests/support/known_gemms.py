"""The GEMMs of the known models' decode forward."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
)
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.parallel_sizes import tensor_share

SHARED = ("llama8b", "qwen0.6b")
"""Models whose shares of two ranks were measured too."""

NORMS = {
    config.hidden_size: LAYER_NORM if config.activation == "gelu_tanh" else RMS_NORM
    for config in SHAPES.values()
}


def _gemms() -> dict[tuple[int, int], tuple[int, int, int, int, bool]]:
    """GEMMs of the known models, by the shape of the weight."""
    gemms = {}
    for config in SHAPES.values():
        hidden, ffn, norm = config.hidden_size, config.ffn_hidden_size, NORMS[config.hidden_size]
        qkv = (config.num_attention_heads + 2 * config.num_kv_heads) * config.head_dim
        fc1 = (2 * ffn, SILU_GATE) if norm == RMS_NORM else (ffn, GELU_TANH)
        for n, epilogue in ((qkv, STORE), fc1, (config.vocab_size, STORE)):
            gemms[n, hidden] = n, hidden, norm, epilogue, norm == LAYER_NORM
        for k in (config.num_attention_heads * config.head_dim, ffn):
            gemms[hidden, k] = hidden, k, NO_NORM, ADD, norm == LAYER_NORM
    for name in SHARED:
        for each in _gemms_of_share(tensor_share(SHAPES[name], 2)):
            gemms.setdefault(each[:2], each)
    return gemms


def _gemms_of_share(config: ModelConfig) -> Iterator[tuple[int, int, int, int, bool]]:
    """Those of one rank of two, which leave partial sums."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    qkv = (config.num_attention_heads + 2 * config.num_kv_heads) * config.head_dim
    for n, epilogue in ((qkv, STORE), (2 * ffn, SILU_GATE), (config.vocab_size, STORE)):
        yield n, hidden, RMS_NORM, epilogue, False
    for k in (config.num_attention_heads * config.head_dim, ffn):
        yield hidden, k, NO_NORM, STORE, False


GEMMS = _gemms()
"""(n, k) -> (n, k, norm, epilogue, bias)."""
