"""Cases for tests of paged decode attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Rows over a cache whose blocks are scattered; NaN in all that no row may read."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    scale: float

    def run(self, rows: Tensor | None = None, *, by_slot: bool = False) -> Tensor:
        """The kernel's output of some rows, their tables gathered or addressed by slot."""
        query, table, lengths, slots = self.query, self.table, self.lengths, None
        if rows is not None:
            query, lengths = query[rows], lengths[rows]
            table, slots = (table, rows) if by_slot else (table[rows], None)
        from megatron_async.kernels.attention.paged_decode_triton import (
            paged_decode_attention_triton,
        )

        return paged_decode_attention_triton(
            query, self.keys, self.values, table, lengths, self.scale, slots
        )

    def expected(self) -> Tensor:
        """By the definition, in float64."""
        block_size = self.keys.shape[1]
        group = self.query.shape[1] // self.keys.shape[2]
        out = []
        for query, table, length in zip(self.query, self.table, self.lengths.tolist(), strict=True):
            blocks = table[: -(-length // block_size)].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for cache in (self.keys, self.values)
            )
            scores = torch.einsum("hd,thd->ht", query.double(), keys) * self.scale
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
        return torch.stack(out)


def make_case(
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    table_dtype: torch.dtype = torch.int64,
    spare_columns: int = 1,
) -> Case:
    """Random contents; the caches are strided views of one tensor."""
    generator = torch.Generator().manual_seed(len(lengths) + heads + head_dim + block_size)
    rows = len(lengths)
    columns = -(-max(lengths) // block_size) + spare_columns
    order = torch.randperm(rows * columns, generator=generator) + 1
    table = order.view(rows, columns)
    shape = (rows * columns + 1, 2, block_size, kv_heads, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    cache[0] = torch.nan
    for row, length in enumerate(lengths):
        beyond = torch.arange(length, columns * block_size)
        blocks = table[row, beyond // block_size]
        cache[blocks, :, beyond % block_size] = torch.nan
    query = torch.randn(rows, heads, head_dim, generator=generator).to(dtype)
    cache = cache.to(device)
    return Case(
        query.to(device),
        cache[:, 0],
        cache[:, 1],
        table.to(device, table_dtype),
        torch.tensor(lengths, device=device),
        head_dim**-0.5,
    )
