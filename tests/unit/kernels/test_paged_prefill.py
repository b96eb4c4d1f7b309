"""Paged attention of prefill chunks: the Triton kernel, the reference, and both in the engine.

On a GPU the kernel is compiled. Without one, ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_prefill
from tests.support.interpreter import compiled, interpreted

pytest.importorskip("triton", reason="the kernel needs triton")

from megatron_async.kernels.attention import paged_prefill_triton
from megatron_async.kernels.attention.paged_prefill_triton import paged_mixed_attention_triton
from megatron_async.kernels.attention.tiles import PrefillTile

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
UNTOUCHED = 7.0
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
Chunk = tuple[int, int]
"""First position and length."""


@dataclass(frozen=True)
class Case:
    """Chunks over a cache whose blocks are scattered; NaN in all that no token may read."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    chunks: Tensor
    scale: float

    def run(self) -> Tensor:
        """The kernel's output; tokens of no chunk hold UNTOUCHED."""
        out = torch.full_like(self.query, UNTOUCHED)
        paged_mixed_attention_triton(
            self.query, self.keys, self.values, self.table, self.chunks, self.scale, out
        )
        return out

    def expected(self) -> Tensor:
        """By the definition, in float64."""
        out = torch.full_like(self.query, UNTOUCHED, dtype=torch.float64)
        block_size = self.keys.shape[1]
        group = self.query.shape[1] // self.keys.shape[2]
        for slot, first, length, start in self.chunks.tolist():
            end = start + length
            blocks = self.table[slot, : -(-end // block_size)]
            keys, values = (
                cache[blocks].flatten(0, 1)[:end].double() for cache in (self.keys, self.values)
            )
            seen = torch.arange(end, device=out.device)
            for token in range(first, first + length):
                until = start + token - first + 1
                query = self.query[token].double().unflatten(0, (-1, group))
                scores = torch.einsum("kgd,tkd->kgt", query, keys) * self.scale
                scores.masked_fill_(seen >= until, -torch.inf)
                attended = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values)
                out[token] = attended.flatten(0, 1)
        return out

    def check(self) -> None:
        out = self.run()
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), self.expected(), rtol=tolerance, atol=tolerance)


def make_case(
    pieces: list[Chunk],
    *,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    kv_heads: int = 2,
    decode_rows: int = 3,
    padding: int = 5,
    spare_entries: int = 2,
) -> Case:
    """Random contents; the caches are strided views of one tensor."""
    generator = torch.Generator().manual_seed(len(pieces) + group + head_dim + block_size)
    slots = len(pieces)
    columns = -(-max(start + length for start, length in pieces) // block_size) + 1
    table = (torch.randperm(slots * columns, generator=generator) + 1).view(slots, columns)
    shape = (slots * columns + 1, 2, block_size, kv_heads, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    cache[0] = torch.nan
    entries = []
    token = decode_rows
    order = torch.randperm(slots, generator=generator).tolist()
    for slot, (start, length) in zip(order, pieces, strict=True):
        entries.append((slot, token, length, start))
        token += length
        beyond = torch.arange(start + length, columns * block_size)
        cache[table[slot, beyond // block_size], :, beyond % block_size] = torch.nan
    token += padding
    entries += [(slots - 1, token, 0, 0)] * spare_entries
    query = torch.randn(token, kv_heads * group, head_dim, generator=generator).to(dtype)
    cache = cache.to(device)
    return Case(
        query.to(device),
        cache[:, 0],
        cache[:, 1],
        table.to(device),
        torch.tensor(entries, dtype=torch.int32, device=device),
        head_dim**-0.5,
    )


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 64, 16), (2, 96, 32), (4, 128, 64), (8, 64, 128), (16, 256, 16), (7, 24, 16)],
)
def test_interpreted_kernel_equals_float64(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int
) -> None:
    make_case(
        [(0, 1), (70, 33), (63, 1), (5, 64), (0, 20)],
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cpu",
        kv_heads=1,
    ).check()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)]
)
@pytest.mark.parametrize(("share", "rows"), [(1, 16), (3, 32)])
def test_programs_may_share_a_head_of_keys(
    device: str, share: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs whose blocks have too little shared memory for all of its query heads."""
    tile = PrefillTile(share, rows, 16, 4, 2)
    monkeypatch.setattr(paged_prefill_triton, "prefill_tile", lambda heads, limit: tile)
    make_case(
        [(0, 1), (20, 13)], group=6, head_dim=16, block_size=16, dtype=torch.float32,
        device=device,
    ).check()  # fmt: skip


@interpreted
@pytest.mark.parametrize("decode_rows", (0, 1, 63, 64))
def test_interpreted_kernel_finds_chunks_wherever_they_begin(decode_rows: int) -> None:
    make_case(
        [(3, 1), (2, 1), (0, 31), (1, 32), (0, 33), (0, 1)],
        group=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
        kv_heads=1,
        decode_rows=decode_rows,
        padding=0,
        spare_entries=0,
    ).check()


@interpreted
def test_interpreted_kernel_leaves_a_step_without_chunks_alone() -> None:
    case = make_case(
        [(0, 4)], group=2, head_dim=16, block_size=16, dtype=torch.float32, device="cpu"
    )
    empty = replace(case, chunks=torch.zeros(3, 4, dtype=torch.int32))
    assert (empty.run() == UNTOUCHED).all()


@pytest.mark.parametrize("group", (1, 4))
def test_reference_equals_float64(group: int) -> None:
    case = make_case(
        [(0, 1), (70, 33), (5, 64)],
        group=group,
        head_dim=32,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    out = torch.full_like(case.query, UNTOUCHED)
    paged_prefill.paged_mixed_attention(
        case.query, case.keys, case.values, case.table, case.chunks, case.scale, out
    )
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
class TestOnGpu:
    @pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
    @pytest.mark.parametrize("block_size", (16, 32, 64, 128))
    @pytest.mark.parametrize("group", (1, 4))
    def test_kernel_equals_float64(
        self, head_dim: int, block_size: int, group: int, dtype: torch.dtype, device: str
    ) -> None:
        make_case(
            [(0, 1), (0, 64), (1, 63), (130, 200), (1000, 77), (511, 1)],
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        ).check()

    @pytest.mark.parametrize("group", (2, 3, 7, 8, 16))
    @pytest.mark.parametrize(("head_dim", "block_size"), [(128, 64), (80, 16), (24, 48)])
    def test_all_groups_equal_float64(
        self, group: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        make_case(
            [(17, 70), (0, 3), (300, 129)],
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        ).check()

    def test_a_chunk_at_the_end_of_a_long_context(self, dtype: torch.dtype, device: str) -> None:
        make_case(
            [(131072 - 40, 40), (70000, 17)],
            group=4,
            head_dim=128,
            block_size=64,
            dtype=dtype,
            device=device,
            kv_heads=1,
        ).check()

    def test_a_chunk_has_bits_of_its_own(self, dtype: torch.dtype, device: str) -> None:
        """Whatever is beside it, and wherever in the step it lies."""
        pieces = [(0, 100), (333, 77), (64, 256)]
        case = make_case(
            pieces, group=4, head_dim=128, block_size=64, dtype=dtype, device=device, padding=900
        )
        out = case.run()
        for slot, first, length, start in case.chunks[:3].tolist():
            for place in (0, 1, 29, 512):
                query = torch.zeros_like(case.query)
                query[place : place + length] = case.query[first : first + length]
                entries = [(slot, place, length, start), (0, query.shape[0], 0, 0)]
                chunks = torch.tensor(entries, dtype=torch.int32, device=device)
                alone = replace(case, query=query, chunks=chunks).run()
                assert torch.equal(alone[place : place + length], out[first : first + length])

    def test_captured_kernel_follows_its_inputs(self, dtype: torch.dtype, device: str) -> None:
        case = make_case(
            [(0, 100), (333, 77)], group=4, head_dim=64, block_size=16, dtype=dtype, device=device
        )
        expected = case.run()
        entries = case.chunks.clone()
        case.chunks.zero_()
        case.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run()
        case.chunks.copy_(entries)
        graph.replay()
        assert torch.equal(out, expected)
