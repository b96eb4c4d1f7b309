"""Forward batches over a cache of their own, without an engine."""

from __future__ import annotations

from typing import Any

import torch

from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache


def new_batch(
    *,
    params_dtype: torch.dtype,
    num_layers: int,
    kv_channels: int,
    num_attention_heads: int,
    device: torch.device | str | None = None,
    kept: torch.dtype | None = None,
    **sizes: Any,
) -> ForwardBatch:
    """A batch over an empty cache of that shape, in dtype ``kept`` if it is not the model's;
    ``sizes`` are those of ``CacheSizes.of``."""
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_attention_heads,
        head_dim=kv_channels,
        dtype=params_dtype,
        kept=kept,
    )
    return ForwardBatch(KVCache(CacheSizes.of(spec.token_bytes, **sizes), spec, device))
