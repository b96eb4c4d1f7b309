"""Query/key norms, rotation and the append to the paged cache, from the packed projection.

One Triton kernel in place of about 25 (split, two norms, table gather, rotation, two copies into
the cache). It moves T x (heads + 2 kv_heads) x head_dim elements once in and once out.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.e4m3_cache import encode, write
from megatron_async.kernels.pdl import pdl_enter, uses_pdl

PER_WARP = 128
"""Elements of a half of all heads that a warp has. Statistics of norms are summed up in an order
that depends on it."""


@triton.jit
def as_kept(x, scale, E4M3: tl.constexpr):
    """``x`` as the cache has it: its own, or the byte of e4m3 that is nearest to its share of the
    scale, ties to even, at most 448 in size."""
    kept = x
    if E4M3:
        bits = (x.to(tl.float32) / scale).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        is_nan = size > 0x7F800000
        size = tl.minimum(size, 0x43E00000)  # of 448
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # A number of this size has steps of 2 ** -9, as subnormal ones of e4m3.
        shifted = size.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        byte = tl.where(is_nan, 0x7F, tl.where(size < 0x3C800000, subnormal, normal))
        kept = (byte | ((bits >> 24) & 0x80)).to(tl.uint8)
    return kept


@triton.jit
def _rope_append_kernel(
    packed_ptr, query_ptr, key_ptr, value_ptr, slot_ptr, position_ptr, cos_sin_ptr,
    q_weight_ptr, k_weight_ptr, scales_ptr, packed_row, cache_token, eps,
    GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, ROPE: tl.constexpr,
    NORM: tl.constexpr, E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One group of one token: GROUP query heads, then its key and its value.

    A head is handled as its halves [0, HALF) and [HALF, 2 HALF), and the rest that is not rotated.
    """
    pdl_enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head = tl.arange(0, HEADS_PAD)
    i = tl.arange(0, HALF_PAD)
    in_half = i < HALF
    mask = (head < GROUP + 1)[:, None] & in_half[None, :]
    source_ptr = packed_ptr + token * packed_row + group * (GROUP + 2) * D
    at = head[:, None] * D + i[None, :]
    dtype: tl.constexpr = packed_ptr.dtype.element_ty
    first = tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if REST_PAD > 0:
        j = 2 * HALF + tl.arange(0, REST_PAD)
        rest_at = head[:, None] * D + j[None, :]
        rest_mask = (head < GROUP + 1)[:, None] & (j < D)[None, :]
        rest = tl.load(source_ptr + rest_at, mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        is_key = (head == GROUP)[:, None]
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        q_weight = tl.load(q_weight_ptr + i, mask=in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + i, mask=in_half, other=0.0).to(tl.float32)
        weight = tl.where(is_key, k_weight[None, :], q_weight[None, :])
        first = (first * factor * weight).to(dtype).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + HALF + i, mask=in_half, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + HALF + i, mask=in_half, other=0.0).to(tl.float32)
        weight = tl.where(is_key, k_weight[None, :], q_weight[None, :])
        second = (second * factor * weight).to(dtype).to(tl.float32)
        if REST_PAD > 0:
            q_weight = tl.load(q_weight_ptr + j, mask=j < D, other=0.0).to(tl.float32)
            k_weight = tl.load(k_weight_ptr + j, mask=j < D, other=0.0).to(tl.float32)
            weight = tl.where(is_key, k_weight[None, :], q_weight[None, :])
            rest = rest * factor * weight
    if ROPE:
        angle_ptr = cos_sin_ptr + tl.load(position_ptr + token) * (2 * HALF) + i
        cos = tl.load(angle_ptr, mask=in_half, other=0.0)[None, :]
        sin = tl.load(angle_ptr + HALF, mask=in_half, other=0.0)[None, :]
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated

    slot = tl.load(slot_ptr + token)
    query_ptr += (token * tl.num_programs(1) + group) * GROUP * D
    in_query = mask & (head < GROUP)[:, None]
    tl.store(query_ptr + at, first.to(dtype), mask=in_query)
    tl.store(query_ptr + at + HALF, second.to(dtype), mask=in_query)
    key_ptr += slot * cache_token + group * D
    key_at = at - GROUP * D
    in_key = mask & (head == GROUP)[:, None]
    key_scale = 1.0
    if E4M3:
        key_scale = tl.load(scales_ptr + group)
        value_scale = tl.load(scales_ptr + tl.num_programs(1) + group)
    tl.store(key_ptr + key_at, as_kept(first.to(dtype), key_scale, E4M3), mask=in_key)
    second = as_kept(second.to(dtype), key_scale, E4M3)
    tl.store(key_ptr + key_at + HALF, second, mask=in_key)
    if REST_PAD > 0:
        tl.store(query_ptr + rest_at, rest.to(dtype), mask=rest_mask & (head < GROUP)[:, None])
        rest_at -= GROUP * D
        rest = as_kept(rest.to(dtype), key_scale, E4M3)
        tl.store(key_ptr + rest_at, rest, mask=rest_mask & (head == GROUP)[:, None])
    d = tl.arange(0, D_PAD)
    value = tl.load(source_ptr + (GROUP + 1) * D + d, mask=d < D)
    if E4M3:
        value = as_kept(value, value_scale, E4M3)
    tl.store(value_ptr + slot * cache_token + group * D + d, value, mask=d < D)


def rope_append(
    packed: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to the cache, return the queries.

    Args:
        packed: ``[T, kv_heads * (group + 2) * head_dim]``: of each group its query heads, its key
            and its value (megatron's order).
        key_cache, value_cache: contiguous ``[blocks, block_size, kv_heads, head_dim]``, in the
            dtype of ``packed``, or e4m3.
        slot_mapping: int64 ``[T]``, block * block_size + offset; may collide in the null block.
        position_ids: int64 ``[T]``.
        cos_sin: fp32 ``[positions, 2, pairs]``, see ``RotaryTable``; None does not rotate.
        q_weight, k_weight: ``[head_dim]``, of an RMSNorm of each head; None for both does not norm.
        scales: of a cache of e4m3, fp32 ``[2, kv_heads]`` of keys and values (``e4m3_cache.py``).

    Returns:
        ``[T, heads, head_dim]``, contiguous. A token's bits depend on that token alone.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    tokens = packed.shape[0]
    group = packed.shape[1] // (kv_heads * head_dim) - 2
    query = packed.new_empty(tokens, kv_heads * group, head_dim)
    if tokens == 0:
        return query
    packed = packed.contiguous()
    if scales is not None:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    half = head_dim // 2 if cos_sin is None else cos_sin.shape[2]
    rest = head_dim - 2 * half
    heads_pad = triton.next_power_of_2(group + 1)
    half_pad, pdl = triton.next_power_of_2(half), uses_pdl(packed.device)
    _rope_append_kernel[(tokens, kv_heads)](
        packed, query, key_cache, value_cache, slot_mapping.contiguous(),
        position_ids.contiguous(), packed if cos_sin is None else cos_sin,
        packed if q_weight is None else q_weight, packed if k_weight is None else k_weight,
        packed if scales is None else scales, packed.shape[1], kv_heads * head_dim, eps,
        GROUP=group, HEADS_PAD=heads_pad, D=head_dim, D_PAD=triton.next_power_of_2(head_dim),
        HALF=half, HALF_PAD=half_pad, REST_PAD=triton.next_power_of_2(rest) if rest else 0,
        ROPE=cos_sin is not None, NORM=q_weight is not None, E4M3=scales is not None,
        PDL=pdl, num_warps=max(1, min(8, heads_pad * half_pad // PER_WARP)), launch_pdl=pdl,
    )  # fmt: skip
    return query


def rope_append_reference(
    packed: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """:func:`rope_append` with PyTorch."""
    kv_heads, head_dim = key_cache.shape[2:]
    grouped: Tensor = packed.unflatten(1, (kv_heads, -1, head_dim))
    query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if q_weight is not None and k_weight is not None:
        query = F.rms_norm(query, (head_dim,), q_weight, eps)
        key = F.rms_norm(key, (head_dim,), k_weight, eps)
    if cos_sin is not None:
        cos, sin = cos_sin[position_ids, None].unbind(2)
        query, key = (_rotate(x, cos, sin) for x in (query, key))
    if scales is not None:
        key, value = encode(key, scales[0]), encode(value, scales[1])
    write(key_cache, slot_mapping, key)
    write(value_cache, slot_mapping, value)
    return query


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1).to(x.dtype)
