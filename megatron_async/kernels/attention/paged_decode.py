"""Attention of decode rows over a paged KV cache: the references, and the way to the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_async.kernels.attention.e4m3_cache import read
from megatron_async.kernels.attention.paged_attention import has_kernel, masked_attention

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
    invariant: bool = False,
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

    ``invariant`` rows have the bits of the tokens of invariant chunks
    (``paged_prefill.paged_mixed_attention``), where both have a kernel and nothing is latent.

    On CUDA this is the Triton kernel where it applies, else
    :func:`paged_decode_attention_reference`.
    """
    if invariant and latent is None and table_rows is not None and has_kernel(query):
        from megatron_async.kernels.attention.invariant.invariant_triton import invariant_rows

        return invariant_rows(
            query, key_cache, value_cache, block_table, lengths, scale, table_rows,
            window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
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
    width: int | None = None,
) -> torch.Tensor:
    """R sequences with n tokens each: query [R, n, Hq, D], block_table [R, C], lengths [R, n].

    Returns [R, n, Hq, D]. The first ``least`` positions belong to all of the sequences. ``width``
    is how many positions are read, whatever the table has; None reads its own. A token's bits
    depend on the width, and neither on R nor, without a ``soft_cap`` and ``sinks``, on n.
    """
    rows, tokens, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    keys = _gathered(key_cache, block_table, width, query.dtype)
    values = keys
    if value_cache is not key_cache:
        values = _gathered(value_cache, block_table, width, query.dtype)
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


def _gathered(
    cache: torch.Tensor, table: torch.Tensor, width: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[R, width, Hkv, D]: the positions of each row's blocks, with zeros behind them."""
    found = read(cache, table, dtype).flatten(1, 2)
    if width is None:
        return found
    further = width - found.shape[1]
    if further > 0:
        return torch.cat((found, found.new_zeros(len(found), further, *found.shape[2:])), dim=1)
    return found[:, :width]


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
    # Neither blocks nor the longest request say how many: others compute the same bits.
    widths = [-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for length in lengths]
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
                block_table[index[:, 0], : -(-width // block_size)],
                torch.tensor([[lengths[row] for row in run] for run in runs]),
                min(max(lengths[row] for row in run) for run in runs),
                scale,
                window,
                soft_cap,
                sinks,
                width,
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
