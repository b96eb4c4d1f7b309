"""Norm of latents, rotations and the append to the paged cache of multi-latent attention.

One Triton kernel in place of about 25 (splits, norm, table gather, two rotations, two
concatenations, a copy into the cache).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.e4m3_cache import encode, write
from megatron_async.kernels.attention.rope_append import as_kept

HEADS_AT_ONCE = 16


@triton.jit
def _latent_append_kernel(
    query_ptr, latent_ptr, out_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr, weight_ptr,
    scales_ptr, heads, query_row, query_head, latent_row, out_row, out_head, cache_token, eps,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    HEADS: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token writes its latent and its key, the others turn HEADS queries each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    pair = tl.arange(0, PAIRS_PAD)
    in_pairs = pair < PAIRS
    angle_ptr = cos_sin_ptr + tl.load(position_ptr + token) * (2 * PAIRS) + pair
    cos = tl.load(angle_ptr, mask=in_pairs, other=0.0)
    sin = tl.load(angle_ptr + PAIRS, mask=in_pairs, other=0.0)
    if part == 0:
        source_ptr = latent_ptr + token * latent_row
        place_ptr = cache_ptr + tl.load(slot_ptr + token) * cache_token
        i = tl.arange(0, RANK_PAD)
        latent = tl.load(source_ptr + i, mask=i < RANK, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
        weight = tl.load(weight_ptr + i, mask=i < RANK, other=0.0).to(tl.float32)
        latent = (latent * factor * weight).to(dtype)
        scale = 1.0
        if E4M3:
            scale = tl.load(scales_ptr)
        tl.store(place_ptr + i, as_kept(latent, scale, E4M3), mask=i < RANK)
        key_ptr = source_ptr + RANK + 2 * pair
        even = tl.load(key_ptr, mask=in_pairs, other=0.0).to(tl.float32)
        odd = tl.load(key_ptr + 1, mask=in_pairs, other=0.0).to(tl.float32)
        key_ptr = place_ptr + RANK + pair
        kept = as_kept((even * cos - odd * sin).to(dtype), scale, E4M3)
        tl.store(key_ptr, kept, mask=in_pairs)
        kept = as_kept((odd * cos + even * sin).to(dtype), scale, E4M3)
        tl.store(key_ptr + PAIRS, kept, mask=in_pairs)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        mask = (head < heads)[:, None] & in_pairs[None, :]
        from_ptr = query_ptr + token * query_row + head[:, None] * query_head + 2 * pair[None, :]
        first = tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + 1, mask=mask, other=0.0).to(tl.float32)
        to_ptr = out_ptr + token * out_row + head[:, None] * out_head + pair[None, :]
        turned = first * cos[None, :] - second * sin[None, :]
        tl.store(to_ptr, turned.to(dtype), mask=mask)
        turned = second * cos[None, :] + first * sin[None, :]
        tl.store(to_ptr + PAIRS, turned.to(dtype), mask=mask)


def latent_append(
    query: Tensor,
    latent: Tensor,
    out: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> None:
    """Rotate queries, norm and rotate what goes into the cache, and write it there.

    Pairs that are rotated are neighbours; they come out half of the rotated part apart.

    Args:
        query: ``[T, heads, 2 * pairs]``, the rotated part of each; may be strided.
        latent: ``[T, rank + 2 * pairs]``, rows contiguous: latents, and the key of all heads.
        out: like ``query``, the rotated queries; may be strided.
        cache: ``[blocks, block_size, 1, rank + 2 * pairs]``, contiguous.
        slot_mapping: int64 ``[T]``, block * block_size + offset; may collide in the null block.
        position_ids: int64 ``[T]``.
        cos_sin: fp32 ``[positions, 2, pairs]``, see ``RotaryTable``.
        weight: ``[rank]``, of an RMSNorm of the latents.
        scales: of a cache of e4m3, fp32 ``[1, 1]`` (``e4m3_cache.py``).
    """
    tokens, heads, rotated = query.shape
    if tokens == 0:
        return
    rank, pairs = latent.shape[1] - rotated, rotated // 2
    if scales is not None:
        cache = cache.view(torch.uint8)
    _latent_append_kernel[(tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))](
        query, latent, out, cache, slot_mapping.contiguous(), position_ids.contiguous(), cos_sin,
        weight, weight if scales is None else scales, heads, query.stride(0), query.stride(1),
        latent.stride(0), out.stride(0), out.stride(1), cache.shape[3], eps,
        RANK=rank, RANK_PAD=triton.next_power_of_2(rank), PAIRS=pairs,
        PAIRS_PAD=triton.next_power_of_2(pairs), HEADS=HEADS_AT_ONCE, E4M3=scales is not None,
        num_warps=4,
    )  # fmt: skip


def latent_append_reference(
    query: Tensor,
    latent: Tensor,
    out: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    weight: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> None:
    """:func:`latent_append` with PyTorch."""
    rank = weight.shape[0]
    cos, sin = cos_sin[position_ids].unbind(1)
    out.copy_(_rotate(query, cos[:, None], sin[:, None]))
    normed = F.rms_norm(latent[:, :rank], (rank,), weight, eps)
    whole = torch.cat((normed, _rotate(latent[:, rank:], cos, sin)), dim=-1)
    whole = whole[:, None] if scales is None else encode(whole[:, None], scales[0])
    write(cache, slot_mapping, whole)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
