"""Attention in which a token has the same bits as a decode row and in any chunk.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU, where
products, sums and powers of a row do not depend on the other rows either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import on_devices

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.kernels.attention.invariant import invariant_triton
from megatron_async.kernels.attention.invariant.invariant_triton import (
    invariant_chunks,
    invariant_rows,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
UNTOUCHED = 7.0
SLOT = 1


@dataclass(frozen=True)
class Sequence:
    """Queries of all tokens of a sequence over scattered blocks; all else is NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    limits: dict[str, Any]

    @property
    def length(self) -> int:
        return len(self.query)

    def rows(self, positions: list[int]) -> Tensor:
        """Each of these tokens as a decode row."""
        at = torch.tensor(positions, device=self.query.device)
        slots = torch.full_like(at, SLOT)
        return invariant_rows(
            self.query[at], self.keys, self.values, self.table, at + 1, 0.2, slots, **self.limits
        )

    def chunks(self, lengths: list[int], before: int = 0) -> Tensor:
        """The sequence in consecutive chunks, behind so many other rows of a step."""
        device = self.query.device
        entries, start = [], 0
        for length in lengths:
            entries.append((SLOT, before + start, length, start))
            start += length
        assert start == self.length
        query = torch.cat((torch.full_like(self.query[:before], 3.0), self.query))
        assert len(query) == before + self.length
        entries.append((0, len(query), 0, 0))
        out = torch.full_like(query, UNTOUCHED)
        table = torch.tensor(entries, dtype=torch.int32, device=device)
        invariant_chunks(query, self.keys, self.values, self.table, table, 0.2, out, **self.limits)
        assert (out[:before] == UNTOUCHED).all()
        return out[before:]

    def expected(self) -> Tensor:
        """By the definition, in float64."""
        blocks = self.table[SLOT, : -(-self.length // self.keys.shape[1])]
        group = self.query.shape[1] // self.keys.shape[2]
        keys, values = (
            cache[blocks].flatten(0, 1)[: self.length].double().repeat_interleave(group, dim=1)
            for cache in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", self.query.double(), keys) * 0.2
        cap, window, sinks = (self.limits.get(k) for k in ("soft_cap", "window", "sinks"))
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(self.length, device=keys.device)
        hidden = at[None] > at[:, None]
        if window is not None:
            hidden = hidden | (at[None] <= at[:, None] - window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            more = sinks.double()[:, None, None].expand(-1, self.length, 1)
            weights = torch.cat((scores, more), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def make(
    length: int,
    device: str,
    *,
    group: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    **limits: Any,
) -> Sequence:
    generator = torch.Generator().manual_seed(length + head_dim + block_size)
    columns = -(-length // block_size) + 2
    table = (torch.randperm(2 * columns, generator=generator) + 1).view(2, columns)
    shape = (2 * columns + 1, 2, block_size, kv_heads, head_dim)
    cache = torch.full(shape, torch.nan)
    for at in range(length):
        here = torch.randn(2, kv_heads, head_dim, generator=generator)
        cache[table[SLOT, at // block_size], :, at % block_size] = here
    query = torch.randn(length, group * kv_heads, head_dim, generator=generator) * 2
    if sinks:
        limits["sinks"] = torch.linspace(-1, 3, group * kv_heads).to(device)
    cache = cache.to(device, dtype)
    return Sequence(query.to(device, dtype), cache[:, 0], cache[:, 1], table.to(device), limits)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 16 tokens, of 32 from 33 on, of 48 from 65 on."""
    monkeypatch.setattr(invariant_triton, "MIN_SPLIT", 16)
    monkeypatch.setattr(invariant_triton, "MAX_SPLITS", 2)


LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "a wide window": {"window": 40},
    "cap and sinks": {"soft_cap": 3.0, "sinks": True},
    "window and sinks": {"window": 20, "sinks": True},
}


SOME = [0, 15, 16, 31, 32, 33, 47, 63, 64, 65, 74]
"""Tokens beside the borders of tiles and splits."""


def ways(length: int) -> Iterator[list[int]]:
    """Chunks of a sequence."""
    yield [length]
    third = length // 3
    yield [1, third, length - third - 2, 1]


@on_devices
@pytest.mark.sweep
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_a_token_has_one_output(limits: dict[str, Any], device: str) -> None:
    """Bits of rows and of all chunks are equal, across splits of three sizes."""
    case = make(75, device, head_dim=8, **limits)
    for number, lengths in enumerate(ways(case.length)):
        chunks = case.chunks(lengths, before=13 * number)
        torch.testing.assert_close(chunks.double(), case.expected(), rtol=1e-5, atol=1e-5)
        assert torch.equal(case.rows(SOME), chunks[SOME]), lengths


@on_devices
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("length", "group", "head_dim", "block_size", "dtype"),
    [
        (90, 1, 64, 48, torch.float16),
        (70, 7, 24, 32, torch.float32),
        (90, 16, 80, 128, torch.bfloat16),
        (70, 3, 256, 16, torch.bfloat16),
        (9, 71, 16, 64, torch.float16),
    ],
)
def test_shapes_of_heads(
    length: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariant_triton, "MIN_SPLIT", 64)
    case = make(length, device, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype)
    chunks, tolerance = case.chunks([length - 5, 5]), TOLERANCE[dtype]
    torch.testing.assert_close(chunks.double(), case.expected(), rtol=tolerance, atol=tolerance)
    some = [0, length - 6, length - 5, length - 1]
    assert torch.equal(case.rows(some), chunks[some])


@on_devices
def test_what_follows_in_a_chunk_changes_nothing(device: str) -> None:
    """Keys behind a token, however large, have no part in it."""
    case = make(70, device)
    whole = case.chunks([70])
    block = case.table[SLOT, 65 // 16]
    case.keys[block, 65 % 16 :] = 1e20
    case.values[block, 65 % 16 :] = -1e20
    assert torch.equal(case.chunks([70])[:65], whole[:65])


@on_devices
def test_strided_caches_and_tables_are_refused(device: str) -> None:
    case = make(20, device)
    at = torch.tensor([3], device=device)
    with pytest.raises(ValueError, match="contiguous"):
        invariant_rows(
            case.query[at], case.keys.transpose(1, 3), case.values, case.table, at + 1, 0.2, at
        )
