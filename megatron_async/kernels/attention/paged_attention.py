"""Attention over a paged KV cache: the readable references, and the way to the kernel.

A block table maps a sequence's positions to blocks: position p lies in block ``table[p // bs]`` at
offset ``p % bs`` (the layout of vLLM's PagedAttention, Kwon et al. 2023). The references compute
in the cache's dtype with PyTorch's scaled dot product attention.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_async.kernels import trial
from megatron_async.kernels.attention import tiles
from megatron_async.kernels.shared_memory import block_limit

logger = logging.getLogger(__name__)

LENGTH_MULTIPLE = 64
"""Rows are attended over their KV length rounded up to this many tokens. The padded length of a
row depends on that row alone, so its result does not depend on the others."""

ROWS_AT_ONCE = 32
"""Most rows whose keys and values are gathered at once."""

TOKENS_AT_ONCE = 16
"""Most tokens of one sequence that are attended together."""

QUERY_MULTIPLE = 8
GATHERED_BYTES = 2**28
"""Bytes of keys that :func:`paged_decode_attention_reference` gathers at once, unless a row has
more."""
KERNEL_HEAD_DIM = 256
MOST_LATENT, MOST_LATENT_ROTATED = 512, 128
"""What the kernels take at most: elements of a latent, and of the rotated part behind it."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(query: torch.Tensor, latent: int | None = None) -> bool:
    """Whether attention with ``query`` [T, Hq, D] runs in Triton kernels; ``latent`` as in
    :func:`paged_decode_attention`."""
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
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def paged_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    table_rows: torch.Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
) -> torch.Tensor:
    """One query token a row: query [R, Hq, D], lengths [R] int64, caches [blocks, bs, Hkv, D].

    Row r attends to the first ``lengths[r]`` positions of the sequence whose blocks are
    ``block_table[table_rows[r]]``; the table is [S, C], integers, and ``table_rows`` [R] int64 or
    None for row r itself. Returns [R, Hq, D]. All shapes are static, so this can be captured, and
    a row's bits do not depend on the other rows, nor on how many there are.

    With a ``window`` a row attends to the last ``window`` of these positions alone, and reads no
    others; with a ``soft_cap`` its scores are capped, and ``sinks`` [Hq] take their share of each
    head's softmax, see :func:`masked_attention`.

    In multi-latent attention (DeepSeek-V2, arXiv:2405.04434) ``value_cache`` is ``key_cache``: the
    first ``latent`` elements of a key are its value. Returns [R, Hq, latent] then.

    On CUDA this is the Triton kernel where it applies, else
    :func:`paged_decode_attention_reference`.
    """
    if has_kernel(query, latent):
        from megatron_async.kernels.attention.paged_decode_triton import (
            paged_decode_attention_triton,
        )

        return paged_decode_attention_triton(
            query, key_cache, value_cache, block_table, lengths, scale, table_rows,
            window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
        )  # fmt: skip
    return paged_decode_attention_reference(
        query, key_cache, value_cache, block_table, lengths, scale, table_rows,
        window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
    )  # fmt: skip


def paged_decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    table_rows: torch.Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
) -> torch.Tensor:
    """:func:`paged_decode_attention` with PyTorch; it reads all C blocks of every row."""
    rows = query.shape[0]
    row_bytes = block_table.shape[1] * key_cache[0].numel() * key_cache.itemsize
    most = max(1, GATHERED_BYTES // row_bytes)
    if rows > most:
        return torch.cat(
            [
                paged_decode_attention_reference(
                    query[some], key_cache, value_cache,
                    block_table[some] if table_rows is None else block_table, lengths[some], scale,
                    None if table_rows is None else table_rows[some],
                    window=window, soft_cap=soft_cap, sinks=sinks, latent=latent,
                )
                for some in (slice(first, first + most) for first in range(0, rows, most))
            ]
        )  # fmt: skip
    if table_rows is not None:
        block_table = block_table[table_rows]
    out = _attend(
        query[:, None], key_cache, value_cache, block_table, lengths[:, None], 0, scale,
        window, soft_cap, sinks,
    )  # fmt: skip
    return out[:, 0, :, :latent]


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    least: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """R sequences with n tokens each: query [R, n, Hq, D], block_table [R, C], lengths [R, n].

    Returns [R, n, Hq, D]. The first ``least`` positions belong to all of the sequences. A token's
    bits depend neither on R nor, without a ``soft_cap`` and ``sinks``, on n.
    """
    rows, tokens, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    keys = key_cache[block_table].flatten(1, 2)
    values = keys
    if value_cache is not key_cache:
        values = value_cache[block_table].flatten(1, 2)
    positions = torch.arange(keys.shape[1], device=query.device)
    # What no token of a sequence sees may be anything, NaN included, and 0 * NaN would spread.
    beyond = positions[least:] >= lengths.amax(1, keepdim=True)
    keys[:, least:].masked_fill_(beyond[:, :, None, None], 0)
    values[:, least:].masked_fill_(beyond[:, :, None, None], 0)
    mask = positions < lengths[:, :, None]
    if window is not None:
        behind = positions < lengths.amin(1, keepdim=True) - window
        keys.masked_fill_(behind[:, :, None, None], 0)
        values.masked_fill_(behind[:, :, None, None], 0)
        mask &= positions >= lengths[:, :, None] - window
    # The heads of a group are the queries of one attention. Padded to a multiple of 8, every
    # thread's scratch memory is aligned alike, and the CPU gives a row the same bits on any thread.
    group = heads // kv_heads
    padded = -(-group // QUERY_MULTIPLE) * QUERY_MULTIPLE
    grouped = query.new_zeros(rows, kv_heads, tokens, padded, head_dim)
    grouped[:, :, :, :group] = query.unflatten(2, (kv_heads, group)).transpose(1, 2)
    mask = mask[:, None, :, None]
    if tokens > 1:
        mask = mask.expand(-1, -1, -1, padded, -1)
    if sinks is not None:
        by_group = sinks.new_zeros(kv_heads, tokens, padded)
        by_group[:, :, :group] = sinks.view(kv_heads, 1, group)
        sinks = by_group.flatten(1)
    # A lone row may run outside of a parallel region, with other matrix kernels.
    shape = (max(rows, 2), -1, -1, -1)
    out: torch.Tensor = masked_attention(
        grouped.flatten(2, 3).expand(shape),
        keys.transpose(1, 2).expand(shape),
        values.transpose(1, 2).expand(shape),
        mask.flatten(2, 3).expand(shape),
        scale,
        soft_cap,
        sinks,
    )
    out = out[:rows].unflatten(2, (tokens, padded))[:, :, :, :group]
    return out.transpose(1, 2).reshape(rows, tokens, heads, head_dim)


def paged_decode_attention_by_length(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: list[int],
    scale: float,
    sequences: list[int] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int | None = None,
) -> torch.Tensor:
    """:func:`paged_decode_attention` for a device whose lengths the caller may read: rows of
    like length are attended together, over no more blocks than they have, a few at a time.

    Neighbours of one sequence, by the names ``sequences`` [R], read its keys and values once.
    """
    block_size = key_cache.shape[1]
    unit = -(-LENGTH_MULTIPLE // block_size)
    widths = [
        min(-(-length // (block_size * unit)) * unit, block_table.shape[1]) for length in lengths
    ]
    groups: dict[tuple[int, int], list[range]] = {}
    if sequences is None or soft_cap is not None or sinks is not None:
        sequences = list(range(len(lengths)))
    for run in _runs(widths, sequences):
        groups.setdefault((widths[run[0]], len(run)), []).append(run)
    out = torch.empty_like(query)
    for (width, tokens), members in groups.items():
        for start in range(0, len(members), ROWS_AT_ONCE):
            runs = members[start : start + ROWS_AT_ONCE]
            index = torch.tensor([list(run) for run in runs])
            found = _attend(
                query[index],
                key_cache,
                value_cache,
                block_table[index[:, 0], :width],
                torch.tensor([[lengths[row] for row in run] for run in runs]),
                min(max(lengths[row] for row in run) for run in runs),
                scale,
                window,
                soft_cap,
                sinks,
            )
            if tokens > 1 and bool(found.isnan().any()):
                # A row's NaN would be its neighbours', too.
                rows = index.flatten()
                found = paged_decode_attention_by_length(
                    query[rows],
                    key_cache,
                    value_cache,
                    block_table[rows],
                    [lengths[row] for run in runs for row in run],
                    scale,
                    window=window,
                    soft_cap=soft_cap,
                    sinks=sinks,
                ).view_as(found)
            out[index] = found
    return out[..., :latent]


def _runs(widths: list[int], sequences: Sequence[int]) -> Iterator[range]:
    """Neighbouring rows of one sequence and like width, a few at a time."""
    first = 0
    for row in range(1, len(widths) + 1):
        if (
            row == len(widths)
            or sequences[row] != sequences[first]
            or widths[row] != widths[first]
            or row - first == TOKENS_AT_ONCE
        ):
            yield range(first, row)
            first = row


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
) -> None:
    """The prefill chunks of a step: query [T, Hq, D], caches [blocks, bs, Hkv, D].

    Entry n of ``chunks`` [N, 4] int32 is (slot, first, length, start): tokens ``first .. first +
    length`` are positions ``start ..`` of the sequence whose blocks are ``block_table[slot]``; the
    table is [S, C] int64, and the keys and values of these positions are in the cache already.
    Causal. Chunks follow each other in the order of their tokens; entries of length 0 come last,
    with ``first`` = T. Writes the tokens of chunks to ``out`` [T, Hq, D], or [T, Hq, latent], and
    leaves the others.

    On CUDA this is the Triton kernel, whose launch depends on shapes alone, where
    :func:`has_kernel` says so; the reference reads ``chunks`` on the host.
    """
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
    keys = key_cache[blocks].flatten(0, 1)[:length]
    values = value_cache[blocks].flatten(0, 1)[:length]
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
