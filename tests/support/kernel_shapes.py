"""Shapes that choosers of tiles are asked for: those of models that have a name, and odd ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import torch

from megatron_async.checkpoint.path import EMBEDDED, model_directory
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    GELU_TANH,
    LAYER_NORM,
    MAX_ROWS,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    padded,
)
from megatron_async.kernels.mamba.layer import MambaSizes
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.shapes import SHAPES

ROWS = (1, 2, 3, 4, 6, 7, 8, 16, 32, 33, 48, 63, 64, 65, 128, 256, 512)
KERNEL_ROWS = sorted({padded(rows) for rows in ROWS if rows <= MAX_ROWS})
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def embedded(name: str) -> ModelConfig:
    path = model_directory(name) / "config.json"
    return ModelConfig.from_dict(json.loads(path.read_text())["model"])


MODELS = [*SHAPES.values(), *map(embedded, EMBEDDED)]


def expert_sizes() -> Iterator[tuple[int, int]]:
    """Hidden sizes, and those of one expert."""
    for config in MODELS:
        if config.num_moe_experts:
            yield config.hidden_size, config.moe_ffn_hidden_size or config.ffn_hidden_size
    yield from itertools.product(
        (16, 48, 80, 256, 320, 720, 1536, 7168, 16384), (16, 48, 176, 704, 1408, 28672)
    )


def head_shapes() -> Iterator[tuple[int, int, int, int | None]]:
    """Query heads, heads of keys, elements of a value, and what latents have behind theirs."""
    for config in MODELS:
        latent, heads = config.latent_attention, config.num_attention_heads
        if latent is not None:
            yield heads, 1, latent.kv_lora_rank, latent.qk_pos_emb_head_dim
        else:
            yield heads, config.num_kv_heads, config.head_dim, None
    yield from itertools.product((1, 7, 16, 71, 128, 512), (1,), (8, 16, 33, 80, 192, 256), (None,))
    yield from itertools.product((1, 10, 16, 128), (1,), (16, 256, 384, 512), (8, 64, 128))


def mamba_sizes() -> Iterator[MambaSizes]:
    yield from (config.mamba for config in MODELS if config.hybrid_override_pattern)
    for head_dim, state in itertools.product((8, 48, 64, 128), (8, 96, 128, 200, 256)):
        yield MambaSizes(6, head_dim, 2, state)


def gemm_shapes() -> set[tuple[int, int, int, int]]:
    """Rows and columns of weights, the norm of the input and the epilogue."""
    found = {(96, 64, RMS_NORM, STORE), (1003, 192, RMS_NORM, STORE), (16, 64, NO_NORM, ADD)}
    for config in MODELS:
        hidden, wide = config.hidden_size, config.ffn_hidden_size
        norm = LAYER_NORM if config.normalization == "LayerNorm" else RMS_NORM
        heads = config.num_attention_heads * config.head_dim
        up = (2 * wide, SILU_GATE) if config.gated else (wide, GELU_TANH)
        found |= {
            (heads + 2 * config.num_kv_heads * config.head_dim, hidden, norm, STORE),
            (hidden, heads, NO_NORM, ADD),
            (up[0], hidden, norm, up[1]),
            (hidden, wide, NO_NORM, ADD),
            (config.vocab_size, hidden, norm, STORE),
        }
    return found
