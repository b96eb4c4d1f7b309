"""Attention of long prefill chunks in parts of few shapes: against the reference over the cache.

On a GPU cuDNN attends for the parts; on a CPU PyTorch's operations take its place, and what is
around them is the same. The Triton kernels run in the interpreter too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.attention.paged_prefill import (
    LEAST_LIBRARY_TOKENS,
    paged_mixed_attention_reference,
)
from megatron_async.runner.memory import attention_metadata
from megatron_async.runner.memory.attention_metadata import (
    AttentionMetadata,
    ChunksApart,
    chunks_apart,
)
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.step.packet import (
    CHUNK_LENGTH,
    PacketLayout,
    PlacedChunk,
    placed_chunks,
    write_packet,
)
from megatron_async.step.plan import Plan, PrefillChunk, RowMap
from tests.support.interpreter import compiled, on_devices
from tests.unit.runner.test_mixed_steps import decode_tiny

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.kernels.attention import whole_prefill

UNTOUCHED = 7.0
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
GPU = [pytest.param("cuda", marks=compiled)]
Pieces = list[tuple[int, int]]
"""First positions and lengths."""


class Case:
    """Chunks over a cache of scattered blocks; NaN in all that no token may read."""

    def __init__(
        self,
        pieces: Pieces,
        *,
        group: int = 2,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        decode_rows: int = 3,
        padding: int = 5,
        e4m3: bool = False,
        sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(map(sum, pieces)) + head_dim)
        slots = len(pieces)
        columns = -(-max(start + length for start, length in pieces) // block_size) + 1
        table = (torch.randperm(slots * columns, generator=generator) + 1).view(slots, columns)
        shape = (slots * columns + 1, 2, block_size, kv_heads, head_dim)
        cache = torch.randn(shape, generator=generator)
        cache[0] = torch.nan
        self.placed: list[PlacedChunk] = []
        token = decode_rows
        order = torch.randperm(slots, generator=generator).tolist()
        for slot, (start, length) in zip(order, pieces, strict=True):
            self.placed.append(PlacedChunk(slot, token, length, start))
            token += length
            beyond = torch.arange(start + length, columns * block_size)
            cache[table[slot, beyond // block_size], :, beyond % block_size] = torch.nan
        rows = [tuple(chunk) for chunk in self.placed] + [(slots - 1, token + padding, 0, 0)]
        query = torch.randn(token + padding, kv_heads * group, head_dim, generator=generator)
        cache = cache.to(device, E4M3 if e4m3 else dtype)
        self.has_others = decode_rows + padding > 0
        self.query = query.to(device, dtype)
        self.keys, self.values = cache[:, 0], cache[:, 1]
        self.table = table.to(device)
        self.chunks = torch.tensor(rows, dtype=torch.int32, device=device)
        self.scale = head_dim**-0.5
        self.sinks = None
        if sinks:
            self.sinks = torch.randn(kv_heads * group, generator=generator).to(device, dtype) * 3

    def expected(self) -> Tensor:
        out = torch.full_like(self.query, UNTOUCHED)
        paged_mixed_attention_reference(
            self.query, self.keys, self.values, self.table, self.chunks, self.scale, out,
            sinks=self.sinks,
        )  # fmt: skip
        return out

    def run(self) -> Tensor:
        out = torch.full_like(self.query, UNTOUCHED) if self.has_others else None
        attended = whole_prefill.whole_mixed_attention(
            self.query, self.keys, self.values, self.table, self.placed, self.scale, out,
            sinks=self.sinks,
        )  # fmt: skip
        assert attended is not None and out in (None, attended)
        return attended

    def check(self) -> None:
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(self.run(), self.expected(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_prefill, "GRID", 16)


SMALL: dict[str, Pieces] = {
    "fresh, on the grid": [(0, 32)],
    "fresh, off the grid": [(0, 33)],
    "behind a prefix": [(32, 16)],
    "behind a prefix that ends between": [(37, 30)],
    "within the first square": [(5, 7)],
    "keys in two pieces": [(16 * 9 + 3, 20)],
    "rows in two pieces": [(16, 40)],
    "several": [(0, 1), (70, 33), (15, 17), (0, 300)],
    "whole squares": [(0, 32), (0, 16), (0, 16), (0, 16), (16, 16), (16, 16), (0, 17), (0, 17)],
}


@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("sinks", (False, True))
def test_parts_give_the_attention_of_chunks(name: str, sinks: bool) -> None:
    Case(SMALL[name], sinks=sinks).check()
    Case(SMALL[name], sinks=sinks, decode_rows=0, padding=0).check()


@pytest.mark.usefixtures("small_grid")
def test_whole_squares_of_one_size_attend_together() -> None:
    case = Case(SMALL["whole squares"])
    runs = whole_prefill.runs_of(case.placed)
    assert [len(run) for run in runs] == [1, 2, 1, 1, 1, 1, 1]
    assert [chunk for run in runs for chunk in run] == case.placed
    many = Case([(0, 16)] * 27)
    assert [len(run) for run in whole_prefill.runs_of(many.placed)] == [16, 8, 2, 1]
    apart = [case.placed[1], case.placed[3]]
    assert [len(run) for run in whole_prefill.runs_of(apart)] == [1, 1]


@pytest.mark.usefixtures("small_grid")
def test_parts_read_a_cache_of_e4m3() -> None:
    Case([(37, 30), (0, 20)], e4m3=True).check()


@pytest.mark.usefixtures("small_grid")
def test_rows_in_front_of_the_first_and_behind_the_last_token_are_not_read() -> None:
    Case([(7, 20)], decode_rows=0, padding=0).check()


def test_sizes_are_few_and_hold_all_lengths() -> None:
    grid = whole_prefill.GRID
    sizes = set()
    for units in range(1, 257):
        for length in (units * grid - grid + 1, units * grid):
            size = whole_prefill.size_of_square(length)
            assert length <= size
            assert size <= units * grid if units <= 16 else 8 * size <= 9 * units * grid
            sizes.add(size)
    assert len(sizes) == 48
    keys, rows = set(), set()
    for units in range(1, 257):
        for bits, found in ((whole_prefill.KEY_BITS, keys), (whole_prefill.ROW_BITS, rows)):
            parts = whole_prefill.pieces(units * grid, bits)
            places = [at for part in parts for at in range(part.start, part.stop, grid)]
            assert places == list(range(0, units * grid, grid))
            found |= {part.stop - part.start for part in parts}
    assert (len(rows), len(keys)) == (9, 28)


@pytest.mark.usefixtures("small_grid")
def test_a_step_without_room_is_left_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is not."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 512 MiB")

    case = Case([(16, 40)])
    given = case.query, case.keys, case.values, case.table, case.placed, case.scale, None
    with monkeypatch.context() as patch:
        patch.setattr(whole_prefill, "gather_blocks", full)
        assert whole_prefill.whole_mixed_attention(*given) is None
    case.check()


def test_short_chunks_are_left_to_the_kernel() -> None:
    long = LEAST_LIBRARY_TOKENS
    chunks = (PlacedChunk(1, 3, long - 1, 5), PlacedChunk(0, long + 2, long, 0))
    table = torch.tensor([*map(tuple, chunks), (9, 2 * long + 2, 0, 0)], dtype=torch.int32)
    apart = chunks_apart(table, chunks)
    assert apart is not None
    assert apart.long == chunks[1:]
    assert apart.others[:, CHUNK_LENGTH].tolist() == [long - 1, 0, 0]
    assert table[:, CHUNK_LENGTH].tolist() == [long - 1, long, 0]
    assert chunks_apart(table, chunks[:1]) is None
    assert not apart.are_all(2 * long + 2)
    alone = chunks_apart(table[1:], chunks[1:])
    assert alone is not None and len(alone.others) == 0
    assert not alone.are_all(2 * long + 2)
    alone = chunks_apart(table[1:], (PlacedChunk(0, 0, long, 5), PlacedChunk(1, long, long, 5)))
    assert alone is not None and alone.are_all(2 * long) and not alone.are_all(2 * long + 1)
    between = (
        PlacedChunk(0, 0, long, 0),
        PlacedChunk(1, long, 1, 0),
        PlacedChunk(2, long + 1, long, 0),
    )
    apart = chunks_apart(torch.tensor(between, dtype=torch.int32), between)
    assert apart is not None and not apart.are_all(2 * long + 1)


def test_placed_chunks_are_the_packets() -> None:
    layout = PacketLayout(4, 64, 4, 4, 3)
    rows = RowMap((2, 0, 1, 3), (0,) * 4, (0,) * 4, (3, 1, 1, 1))
    chunks = (PrefillChunk(2, 1, 4, (5,) * 9, samples=True), PrefillChunk(3, 3, 0, (6,), False))
    plan = Plan(0, rows, 2, (), chunks)
    words = torch.zeros(layout.width, dtype=torch.int32).numpy()
    write_packet(words, layout, plan, 4, 64, null_slot=9)
    table = words[layout.chunks : layout.assignments].reshape(-1, 4)
    placed = placed_chunks(plan)
    assert placed == (PlacedChunk(1, 4, 9, 4), PlacedChunk(3, 13, 1, 0))
    assert table[:2].tolist() == [list(chunk) for chunk in placed]


@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize("refused", (False, True))
def test_steps_attend_apart_from_other_chunks(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long chunk between a decode row and a short chunk, which the library never sees."""
    case = Case([(20, 40), (3, 9)], decode_rows=0)
    others = case.chunks.clone()
    others[0, CHUNK_LENGTH] = 0
    seen: list[Any] = []
    attend = whole_prefill.whole_mixed_attention

    def watched(*given: Any, **options: Any) -> Tensor | None:
        seen.append(given[4])
        return None if refused else attend(*given, **options)

    monkeypatch.setattr(whole_prefill, "library_attends", lambda *_, **__: True)
    monkeypatch.setattr(whole_prefill, "whole_mixed_attention", watched)
    nothing = torch.zeros(len(case.query), dtype=torch.int64)
    metadata = AttentionMetadata(
        nothing, nothing, nothing, 0, nothing[:0], chunks=case.chunks,
        apart=ChunksApart((case.placed[0],), others),
    )  # fmt: skip
    cache = torch.stack([case.keys, case.values])[None]
    for invariant in (False, True):
        attention = CacheAttention(cache, case.table, batch_invariant=invariant)
        monkeypatch.setattr(attention, "_each_token_is_a_row", lambda *_: False)
        out = attention.attend_appended(
            metadata, case.query, case.keys, case.values, case.scale, {}
        )
        tokens = slice(0, 49)
        torch.testing.assert_close(out[tokens], case.expected()[tokens], rtol=1e-5, atol=1e-5)
    assert seen == [(case.placed[0],)]


@pytest.mark.parametrize("device", ["cpu", *GPU])
def test_engines_tell_the_library_which_tokens_are_where(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that no graph holds, with chunks behind others and beside decode rows; on a CPU those
    of a device that knows no lengths. Each chunk attends as by the reference, on a CPU to the end:
    its tokens are those of plain steps."""
    attended: list[tuple[PlacedChunk, ...]] = []
    attend = whole_prefill.whole_mixed_attention

    def watched(*given: Any, **options: Any) -> Tensor | None:
        out = attend(*given, **options)
        query, keys, values, table, chunks, scale, _ = given
        places = torch.tensor(chunks, dtype=torch.int32, device=query.device)
        expected = torch.zeros_like(query)
        paged_mixed_attention_reference(query, keys, values, table, places, scale, expected)
        assert out is not None
        tolerance = TOLERANCE[query.dtype]
        for chunk in chunks:
            own = slice(chunk.first, chunk.first + chunk.length)
            torch.testing.assert_close(out[own], expected[own], rtol=tolerance, atol=tolerance)
        attended.append(chunks)
        return out

    dtype = "bfloat16" if device == "cuda" else "float32"
    plain = decode_tiny(1, "cpu", count=4)[0] if device == "cpu" else None
    monkeypatch.setattr(whole_prefill, "GRID", 16)
    monkeypatch.setattr(attention_metadata, "LEAST_LIBRARY_TOKENS", 7)
    monkeypatch.setattr(whole_prefill, "library_attends", lambda *_, **__: True)
    monkeypatch.setattr(whole_prefill, "whole_mixed_attention", watched)
    tokens, _ = decode_tiny(
        1,
        device,
        count=4,
        fixed_shapes=device == "cpu",
        dtype=dtype,
        capture_mixed_steps=False,
    )
    assert plain is None or tokens == plain
    seen = {chunk for chunks in attended for chunk in chunks}
    assert any(chunk.first > 0 for chunk in seen) and any(chunk.start > 0 for chunk in seen)


def test_a_cpu_and_what_cudnn_lacks_are_left_to_other_kernels() -> None:
    assert not whole_prefill.library_attends(torch.zeros(1, 2, 64, dtype=torch.bfloat16), 2)


@on_devices
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (24, 80), (64, 128)])
@pytest.mark.parametrize("e4m3", (False, True))
def test_gathered_blocks_are_the_references(
    block_size: int, head_dim: int, e4m3: bool, device: str
) -> None:
    case = Case([(30, 41)], block_size=block_size, head_dim=head_dim, device=device, e4m3=e4m3)
    found = torch.full((2, 80, 2, head_dim), torch.nan, device=device)
    expected = found.clone()
    whole_prefill.gather_into_triton(case.keys, case.values, case.table[0], 71, found)
    whole_prefill.gather_into_reference(case.keys, case.values, case.table[0], 71, expected)
    assert torch.equal(found, expected)


@on_devices
def test_merged_parts_are_the_references(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    total, other = torch.randn(2, 45, 3, 80, generator=generator).to(device)
    mass, other_mass = (8 * torch.randn(2, 3, 45, generator=generator)).to(device)
    rows = slice(4, 41)
    given = (other[rows], other_mass[:, rows])
    expected, expected_mass = total.clone(), mass.clone()
    whole_prefill.merge_reference(expected[rows], expected_mass[:, rows], *given)
    whole_prefill.merge_triton(total[rows], mass[:, rows], *given)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mass, expected_mass, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", GPU)
class TestOnGpu:
    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    @pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (8, 64), (1, 80), (2, 96)])
    @pytest.mark.parametrize("sinks", (False, True))
    def test_cudnn_attends_like_the_reference(
        self, group: int, head_dim: int, dtype: torch.dtype, sinks: bool, device: str
    ) -> None:
        case = Case(
            [(0, 1024), (0, 1024), (0, 1500), (3000, 1100), (512, 2048), (700, 37)],
            group=group, head_dim=head_dim, dtype=dtype, device=device, sinks=sinks,
        )  # fmt: skip
        assert whole_prefill.library_attends(case.query, 2)
        case.check()

    def test_parts_read_a_cache_of_e4m3(self, device: str) -> None:
        Case([(1300, 1025)], dtype=torch.bfloat16, e4m3=True, device=device).check()

    def test_what_cudnn_lacks_is_left_to_other_kernels(self, device: str) -> None:
        def attends(
            head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **limits: Any
        ) -> bool:
            query = torch.zeros(1, 8, head_dim, dtype=dtype, device=device)
            return whole_prefill.library_attends(query, 2, **limits)

        assert attends() and attends(64, torch.float16) and attends(sinks=torch.zeros(8))
        assert not attends(256) and not attends(100) and not attends(dtype=torch.float32)
        assert not attends(window=128) and not attends(soft_cap=30.0) and not attends(latent=64)

    def test_heads_that_the_library_refuses_are_left_to_other_kernels(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(whole_prefill, "_refused", set())

        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no plan")

        monkeypatch.setattr(whole_prefill, "attend_part", refuse)
        case = Case([(0, 1024)], dtype=torch.bfloat16, device=device)
        out = torch.zeros_like(case.query)
        given = (case.query, case.keys, case.values, case.table, case.placed, case.scale, out)
        assert whole_prefill.whole_mixed_attention(*given) is None
        assert not whole_prefill.library_attends(case.query, 2)

    def test_nothing_waits_for_the_device(self, device: str) -> None:
        case = Case([(1300, 1025), (0, 1024)], dtype=torch.bfloat16, device=device)
        case.run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            chunks_apart(case.chunks, tuple(case.placed))
            case.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
