"""Attention over a paged KV cache: what ``paged_decode.py`` and ``paged_prefill.py`` share.

A block table maps a sequence's positions to blocks: position p lies in block ``table[p // bs]`` at
offset ``p % bs`` (the layout of vLLM's PagedAttention, Kwon et al. 2023). The references compute
in the cache's dtype with PyTorch's scaled dot product attention.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_async.kernels import trial
from megatron_async.kernels.attention import tiles
from megatron_async.kernels.attention.e4m3_cache import write
from megatron_async.kernels.shared_memory import block_limit

logger = logging.getLogger(__name__)

KERNEL_HEAD_DIM = 256
MOST_LATENT, MOST_LATENT_ROTATED = 512, 128
"""What the kernels take at most: elements of a latent, and of the rotated part behind it."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(query: torch.Tensor, latent: int | None = None) -> bool:
    """Whether attention with ``query`` [T, Hq, D] runs in Triton kernels; ``latent`` as in
    ``paged_decode.paged_decode_attention``."""
    size = query.shape[-1]
    if latent is None:
        fits = size <= KERNEL_HEAD_DIM
    else:
        fits = trial.LATENT and latent <= MOST_LATENT and size - latent <= MOST_LATENT_ROTATED
    if not query.is_cuda or query.dtype not in KERNEL_DTYPES or not fits:
        return False
    limit = block_limit(query.device)
    if tiles.fits(tiles.Heads.of(query, 1, latent), limit):
        return True
    _warn_of_no_room(size, query.dtype, limit)
    return False


@functools.cache
def _warn_of_no_room(head_dim: int, dtype: torch.dtype, limit: int) -> None:
    logger.warning(
        "attention runs in PyTorch's operations and reads whole block tables, which is slow: heads "
        "of %d elements of %s do not fit into %d bytes of shared memory",
        head_dim, dtype, limit,
    )  # fmt: skip


def append_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key and value [T, Hkv, D] to positions ``slot_mapping`` [T] (block * bs + offset).

    The caches are [blocks, bs, Hkv, D]. Padding and dead tokens point into the null block, where
    several of them may collide.
    """
    write(key_cache, slot_mapping, key)
    write(value_cache, slot_mapping, value)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    *,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of query ``[..., H, Q, D]`` over key and value ``[..., Hkv, K, D]`` where ``mask``
    (bool, broadcast to ``[..., H, Q, K]``) is true. Scores s become ``soft_cap * tanh(s /
    soft_cap)`` before the mask (Gemma 2, arXiv:2408.00118). ``sinks``, broadcast to ``[..., H,
    Q]``, are one more score each, of a token without a value (attention sinks, arXiv:2309.17453, as
    GPT-OSS learns them)."""
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float()[..., None]
        highest = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = torch.exp(scores - highest)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - highest))
    return (weights @ value.float()).to(query.dtype)
