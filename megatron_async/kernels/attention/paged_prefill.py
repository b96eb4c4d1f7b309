"""Attention of prefill chunks over a paged KV cache: the reference, and the way to the kernel."""

from __future__ import annotations

import torch

from megatron_async.kernels.attention.e4m3_cache import read
from megatron_async.kernels.attention.paged_attention import has_kernel, masked_attention


def paged_mixed_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
    invariant: bool = False,
) -> None:
    """The prefill chunks of a step: query [T, Hq, D], caches [blocks, bs, Hkv, D].

    Entry n of ``chunks`` [N, 4] int32 is (slot, first, length, start): tokens ``first .. first +
    length`` are positions ``start ..`` of the sequence whose blocks are ``block_table[slot]``; the
    table is [S, C] int64, and the keys and values of these positions are in the cache already.
    Causal. Chunks follow each other in the order of their tokens; entries of length 0 come last,
    with ``first`` = T. Writes the tokens of chunks to ``out`` [T, Hq, D], or [T, Hq, latent], and
    leaves the others.

    ``invariant`` chunks, which are not latent, give a token the bits of an invariant decode row
    (``paged_decode.paged_decode_attention``), on CUDA where :func:`has_kernel` says so.

    On CUDA this is a kernel whose launch depends on shapes alone: ``prefill_attention.cu`` where
    ``prefill_attention.why_not`` has no reason, else Triton's where :func:`has_kernel` does. The
    reference reads ``chunks`` on the host.
    """
    if invariant and latent is None and has_kernel(query):
        from megatron_async.kernels.attention.invariant.invariant_triton import invariant_chunks

        invariant_chunks(
            query, key_cache, value_cache, block_table, chunks, scale, out,
            window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
        return
    if query.is_cuda:
        from megatron_async.kernels.attention import prefill_attention

        reason = prefill_attention.why_not(query, key_cache, latent=latent, sinks=sinks)
        if reason is None:
            prefill_attention.prefill_attention(
                query, key_cache, value_cache, block_table, chunks, scale, out,
                window=window, soft_cap=soft_cap, sinks=sinks,
            )  # fmt: skip
            return
        prefill_attention.log_once(reason)
    if has_kernel(query, latent):
        from megatron_async.kernels.attention.paged_prefill_triton import (
            paged_mixed_attention_triton,
        )

        paged_mixed_attention_triton(
            query, key_cache, value_cache, block_table, chunks, scale, out,
            window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
        )  # fmt: skip
        return
    paged_mixed_attention_reference(
        query, key_cache, value_cache, block_table, chunks, scale, out,
        window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
    )  # fmt: skip


def paged_mixed_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
) -> None:
    """:func:`paged_mixed_attention` with PyTorch, chunk after chunk."""
    for slot, first, length, start in chunks.tolist():
        if length:
            tokens = slice(first, first + length)
            out[tokens] = paged_prefill_attention(
                query[tokens], key_cache, value_cache, block_table[slot], start, scale,
                window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
            )  # fmt: skip


def paged_prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
) -> torch.Tensor:
    """A chunk of one sequence: query [T, Hq, D] at positions ``start .. start + T``.

    ``block_table`` [C] int64 covers at least start + T positions, whose keys and values (the
    chunk's own included) are in the cache already. Causal. Returns [T, Hq, D or latent].
    """
    tokens = query.shape[0]
    length = start + tokens
    block_size = key_cache.shape[1]
    blocks = block_table[: -(-length // block_size)]
    keys = read(key_cache, blocks, query.dtype).flatten(0, 1)[:length]
    values = read(value_cache, blocks, query.dtype).flatten(0, 1)[:length]
    positions = torch.arange(length, device=query.device)
    mask = positions[None, :] <= positions[start:, None]
    if window is not None:
        mask &= positions[None, :] > positions[start:, None] - window
        # What the first token does not see may be anything, NaN included.
        unseen = (positions <= start - window)[:, None, None]
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    out = masked_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        mask[None, None],
        scale,
        soft_cap,
        None if sinks is None else sinks[:, None],
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)[..., :latent]
