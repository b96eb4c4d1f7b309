"""Attention of a forward's tokens to the KV cache: which kernel takes which of them."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.kernels.attention import paged_attention, paged_decode, paged_prefill
from megatron_async.kernels.attention.e4m3_cache import by_head, encode, write
from megatron_async.runner.memory.attention_metadata import AttentionMetadata

if TYPE_CHECKING:
    from megatron_async.kernels.attention.decode_attention import (
        DecodeAttention,
        DecodeAttentions,
        Heads,
    )

logger = logging.getLogger(__name__)


@functools.cache
def warn_of_slow_attention(kv_channels: int) -> None:
    """Said once for each head size."""
    logger.warning(
        "a head size of %d is above %d, the largest of the Triton kernels: attention runs in "
        "PyTorch's operations and reads whole block tables, which is slow",
        kv_channels,
        paged_attention.KERNEL_HEAD_DIM,
    )


@functools.cache
def _warn_of_latents_on_trial(reason: str) -> None:
    logger.warning(
        "multi-latent attention runs in PyTorch's operations and reads whole block tables, which "
        "is slow: its kernels are %s",
        reason,
    )


@functools.cache
def _warn_of_steps_apart(reason: str) -> None:
    logger.warning("keys and values are appended first, then attended in Triton: %s", reason)


def warn_if_slow(kv_cache: torch.Tensor) -> None:
    """Say so if the cache is on a GPU and none of its kernels reads it."""
    if kv_cache.device.type != "cuda":
        return
    from megatron_async.kernels import trial

    is_latent, kv_channels = kv_cache.shape[1] == 1, kv_cache.shape[-1]
    if is_latent and not trial.LATENT:
        _warn_of_latents_on_trial(trial.REASON)
    elif not is_latent and kv_channels > paged_attention.KERNEL_HEAD_DIM:
        warn_of_slow_attention(kv_channels)


class CacheAttention:
    """A KV cache, and attention to it. Each call has the tokens of the forward that runs.

    Args:
        kv_cache: [layers, 2, blocks, block size, Hkv, D], keys and values; [layers, 1, ...] of
            latents, keys that their values are a part of.
        block_table: int64 [slots, blocks of a slot].
        batch_invariant: every token attends as a row of its own, those of chunks too.
        scales: of a cache of e4m3, fp32 [layers, 2 or 1, Hkv], powers of two.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        *,
        batch_invariant: bool,
        scales: torch.Tensor | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._scales = scales
        self._block_table = block_table
        self._batch_invariant = batch_invariant
        self._decode_attentions: DecodeAttentions | None = None

    def release(self) -> None:
        """Free the cache."""
        self.kv_cache = self.kv_cache.new_empty(0)

    def attend(
        self,
        tokens: AttentionMetadata,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        limits: dict[str, Any],
    ) -> torch.Tensor:
        """See the context's."""
        keys, values = self.kv_cache[layer]
        scales = self._scales_of(layer)
        if scales is not None:
            key, value = (encode(x, each) for x, each in zip((key, value), scales, strict=True))
        paged_attention.append_kv(keys, values, key, value, tokens.slot_mapping)
        return self.attend_appended(tokens, query, keys, values, scale, limits, scales)

    def attend_latent(
        self,
        tokens: AttentionMetadata,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor | None,
        scale: float,
        rank: int,
    ) -> torch.Tensor:
        """See the context's."""
        (keys,) = self.kv_cache[layer]
        scales = self._scales_of(layer)
        if latent is not None:
            latent = latent if scales is None else encode(latent, scales[0])
            write(keys, tokens.slot_mapping, latent)
        return self.attend_appended(tokens, query, keys, keys, scale, {"latent": rank}, scales)

    def append_latent(
        self,
        tokens: AttentionMetadata,
        layer: int,
        query: torch.Tensor,
        packed: torch.Tensor,
        out: torch.Tensor,
        cos_sin: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        """See the context's."""
        from megatron_async.kernels.attention.latent_append import latent_append

        (keys,) = self.kv_cache[layer]
        latent_append(
            query, packed.contiguous(), out, keys, tokens.slot_mapping, tokens.position_ids,
            cos_sin, weight, eps, self._scales_of(layer),
        )  # fmt: skip

    def attend_packed(
        self,
        tokens: AttentionMetadata,
        layer: int,
        packed: torch.Tensor,
        scale: float,
        cos_sin: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        limits: dict[str, Any],
    ) -> torch.Tensor:
        """See the context's."""
        from megatron_async.kernels.attention.rope_append import rope_append

        keys, values = self.kv_cache[layer]
        heads = self.heads_of_decode(tokens, packed, cos_sin, q_weight, k_weight, limits)
        attention = None if heads is None else self._decode_attention(heads, packed.shape[0])
        if heads is not None and attention is not None:
            out = packed.new_empty(packed.shape[0], heads.kv_heads * heads.group, heads.head_dim)
            attention(
                packed.contiguous(), keys, values, self._block_table, tokens.token_slots,
                tokens.position_ids.contiguous(), tokens.slot_mapping, out, scale=scale,
                cos_sin=cos_sin, q_weight=q_weight, k_weight=k_weight, eps=eps,
                scales=self._scales_of(layer), sinks=limits.get("sinks"),
            )  # fmt: skip
            return out
        query = rope_append(
            packed, keys, values, tokens.slot_mapping, tokens.position_ids, cos_sin, q_weight,
            k_weight, eps, self._scales_of(layer),
        )  # fmt: skip
        return self.attend_appended(
            tokens, query, keys, values, scale, limits, self._scales_of(layer)
        )

    def _scales_of(self, layer: int) -> torch.Tensor | None:
        return None if self._scales is None else self._scales[layer]

    def _decode_attention(self, heads: Heads, tokens: int) -> DecodeAttention | None:
        """Return the kernel for ``tokens`` tokens; None if the GPU does not run it."""
        from megatron_async.kernels.attention.decode_attention import DecodeAttentions
        from megatron_async.kernels.compile import KernelTooLargeError

        if self._decode_attentions is None:
            self._decode_attentions = DecodeAttentions(self.kv_cache.device)
        capacity = self._block_table.shape[1] * self.kv_cache.shape[3]
        try:
            return self._decode_attentions.get(heads, tokens // heads.window, capacity)
        except KernelTooLargeError as error:
            _warn_of_steps_apart(str(error))
            return None

    def heads_of_decode(
        self,
        tokens: AttentionMetadata,
        packed: torch.Tensor,
        cos_sin: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        limits: dict[str, Any] | None = None,
    ) -> Heads | None:
        """What one kernel takes all attention of a decode step as, if there is one that does."""
        is_plain_decode = tokens.chunks is None and tokens.decode_lengths_host is None
        if not is_plain_decode or self._batch_invariant or tokens.window is None:
            return None
        from megatron_async.kernels.attention.decode_attention import heads_of

        return heads_of(
            packed, self.kv_cache, cos_sin, q_weight, k_weight, tokens.window,
            gaps=tokens.has_gaps, limits=limits,
        )  # fmt: skip

    def attend_appended(
        self,
        tokens: AttentionMetadata,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        limits: dict[str, Any],
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over what the cache has already, times ``scales`` [2 or 1, Hkv]."""
        if scales is not None:
            # Powers of two: neither product is rounded.
            query = query * by_head(scales[0], query.shape[1], query.dtype)
            out = self.attend_appended(tokens, query, keys, values, scale, limits)
            return out.mul_(by_head(scales[-1], query.shape[1], query.dtype))
        rows = tokens.decode_rows
        if tokens.chunks is None or self._each_token_is_a_row(query, limits):
            return self._attend_decode(tokens, query, keys, values, scale, limits)
        out = query.new_zeros(*query.shape[:2], limits.get("latent", query.shape[2]))
        if rows:
            out[:rows] = self._attend_decode(tokens, query[:rows], keys, values, scale, limits)
        paged_prefill.paged_mixed_attention(
            query, keys, values, self._block_table, tokens.chunks, scale, out,
            invariant=self._batch_invariant, **limits,
        )  # fmt: skip
        return out

    def _each_token_is_a_row(self, query: torch.Tensor, limits: dict[str, Any]) -> bool:
        """Whether the tokens of chunks attend like decode rows: where no kernel takes the chunks,
        or none that gives them the bits of rows."""
        latent = limits.get("latent")
        if self._batch_invariant and (latent is not None or not query.is_cuda):
            return True
        return query.is_cuda and not paged_attention.has_kernel(query, latent)

    def _attend_decode(
        self,
        tokens: AttentionMetadata,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        limits: dict[str, Any],
    ) -> torch.Tensor:
        if self._each_token_is_a_row(query, limits):
            # Decode rows and the tokens of chunks alike: each attends up to its own position.
            slots, lengths = tokens.token_slots, tokens.position_ids + 1
            lengths_host = None if query.is_cuda else lengths.tolist()
        else:
            slots, lengths = tokens.token_slots[: tokens.decode_rows], tokens.decode_lengths
            lengths_host = tokens.decode_lengths_host
        if lengths_host is None:
            return paged_decode.paged_decode_attention(
                query, keys, values, self._block_table, lengths, scale, slots,
                invariant=self._batch_invariant, **limits,
            )  # fmt: skip
        tables = self._block_table[slots]
        return paged_decode.paged_decode_attention_by_length(
            query, keys, values, tables, lengths_host, scale, slots.tolist(), **limits
        )
