"""Attention of prefill chunks on Hopper (``prefill_attention.cu``) against float32."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_prefill, prefill_attention
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.attention.prefill_attention import Form, has_map, is_addressed, why_not
from megatron_async.kernels.shared_memory import HOPPER_BYTES
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both, on_gpu
from tests.unit.kernels.test_paged_prefill import UNTOUCHED, Case, make_case

pytestmark = pytest.mark.sweep

__all__ = ["device"]

BF16, HALF = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 1.6e-2, HALF: 3e-3}
SM_COUNT = 3
"""Of the emulated GPU, so that a CTA has several tiles."""
LAUNCHES = 4
"""Of a case in the emulator, each of which runs threads in another order."""
Pieces = list[tuple[int, int]]
"""First positions and lengths."""


class Attention:
    """Chunks, and what layers ask for that are not plain."""

    def __init__(
        self,
        device: torch.device,
        pieces: Pieces,
        *,
        group: int = 4,
        head_dim: int = 64,
        block_size: int = 64,
        dtype: torch.dtype = BF16,
        e4m3: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        kv_heads: int = 1,
        **more: Any,
    ) -> None:
        case = make_case(
            pieces, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype,
            device=str(device), kv_heads=kv_heads, **more,
        )  # fmt: skip
        if e4m3:
            case = replace(case, keys=case.keys.to(E4M3), values=case.values.to(E4M3))
        self.case: Case = case
        self.limits: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
        if window is not None:
            self._forget_what_nobody_sees(window)
        if sinks:
            drawn = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(3))
            self.limits["sinks"] = (drawn * 2).to(device, BF16)

    def _forget_what_nobody_sees(self, window: int) -> None:
        """NaN in front of the windows of all tokens of a chunk."""
        case, block_size = self.case, self.case.keys.shape[1]
        for slot, _, length, start in case.chunks.tolist():
            places = torch.arange(max(start + 1 - window, 0) if length else 0)
            blocks = case.table[slot].cpu()[places // block_size]
            for cache in (case.keys, case.values):
                held = cache.float().cpu()
                held[blocks, places % block_size] = torch.nan
                cache.copy_(held.to(cache.device, cache.dtype))

    def run(self, case: Case | None = None) -> Tensor:
        """The kernel's output; tokens of no chunk hold UNTOUCHED."""
        case = case or self.case
        out = torch.full_like(case.query, UNTOUCHED)
        prefill_attention.prefill_attention(
            case.query, case.keys, case.values, case.table, case.chunks, case.scale, out,
            **self.limits,
        )  # fmt: skip
        return out

    def expected(self) -> Tensor:
        """In float32, by the reference."""
        case = self.case
        out = torch.full_like(case.query, UNTOUCHED, dtype=torch.float32)
        paged_prefill.paged_mixed_attention_reference(
            case.query.float(), case.keys.float(), case.values.float(), case.table, case.chunks,
            case.scale, out, **self.limits,
        )  # fmt: skip
        return out

    def check(self, launches: int = 1) -> None:
        expected, first = self.expected(), self.run()
        tolerance = TOLERANCE[first.dtype]
        torch.testing.assert_close(first.float(), expected, rtol=tolerance, atol=tolerance)
        for _ in range(launches - 1):
            assert torch.equal(self.run(), first)


RAGGED: Pieces = [(0, 1), (70, 33), (63, 1), (5, 64), (0, 20)]
SMALL: list[tuple[Pieces, dict[str, Any]]] = [
    (RAGGED, {}),
    (RAGGED, {"decode_rows": 0, "padding": 0, "spare_entries": 0}),
    # All sizes of heads, padded ones too, in all groups and blocks.
    ([(0, 140), (130, 200)], {"group": 2, "head_dim": 128, "block_size": 16}),
    ([(300, 20), (0, 65)], {"group": 7, "head_dim": 96, "block_size": 32}),
    ([(300, 20), (0, 150)], {"group": 1, "block_size": 48, "kv_heads": 2}),
    ([(100, 20), (0, 70)], {"head_dim": 256}),
    ([(100, 20), (0, 70)], {"head_dim": 192, "block_size": 128}),
    ([(60, 20), (0, 7)], {"group": 5, "head_dim": 24, "kv_heads": 3}),
    ([(60, 20), (0, 7)], {"group": 32, "head_dim": 80}),
    # More entries than lanes, of which some have no tokens.
    ([(n, 1 + n % 3) for n in range(40)], {"group": 16, "spare_entries": 30}),
    # Windows that end within a tile, at its border, and before the chunk begins.
    ([(300, 40), (0, 150)], {"window": 50}),
    ([(300, 70), (128, 128)], {"window": 128, "block_size": 16}),
    ([(300, 40), (10, 5)], {"window": 1, "head_dim": 128}),
    ([(200, 40), (0, 150)], {"window": 1000}),
    ([(200, 40), (0, 70)], {"soft_cap": 5.0}),
    ([(200, 40), (0, 70)], {"sinks": True, "kv_heads": 2}),
    ([(200, 40), (20, 200)], {"window": 130, "soft_cap": 3.0, "sinks": True, "block_size": 16}),
]
SMALL += [
    (pieces, {**options, "e4m3": True})
    for pieces, options in (
        (RAGGED, {}),
        ([(130, 100), (0, 140)], {"group": 2, "head_dim": 128, "block_size": 16}),
        ([(100, 20), (0, 70)], {"head_dim": 256}),
        ([(100, 20), (0, 70)], {"head_dim": 192, "block_size": 32, "group": 7}),
        ([(200, 40), (20, 200)], {"window": 130, "soft_cap": 3.0, "sinks": True, "head_dim": 80}),
    )
]
SMALL += [
    (pieces, {**options, "dtype": HALF})
    for pieces, options in (
        (RAGGED, {"head_dim": 128}),
        ([(200, 40), (20, 200)], {"window": 130, "soft_cap": 3.0, "head_dim": 80}),
    )
]
LONG: Pieces = [(0, 1), (0, 64), (1, 63), (130, 200), (1000, 77), (511, 1), (0, 4096)]
ON_GPU: list[tuple[Pieces, dict[str, Any]]] = [
    (LONG, {"head_dim": head_dim, "block_size": block_size, "group": group, "kv_heads": 2})
    for head_dim, block_size, group in itertools.product(
        (64, 96, 128, 192, 256), (16, 64, 128), (1, 4)
    )
]
ON_GPU += [
    (LONG, {"head_dim": head_dim, "group": group})
    for head_dim, group in itertools.product((80, 128), (2, 3, 7, 8, 16, 32))
]
ON_GPU += [([(131072 - 40, 40), (70000, 17)], {"head_dim": 128}), *SMALL]
ON_GPU += [
    (LONG, {"e4m3": True, "head_dim": head_dim, "block_size": block_size, "kv_heads": 2})
    for head_dim, block_size in itertools.product((64, 96, 128, 192, 256), (16, 64))
]
ON_GPU += [
    (LONG, {"dtype": HALF, "head_dim": head_dim, "kv_heads": 2}) for head_dim in (64, 128, 256)
]
ON_GPU += [
    (LONG, {"window": window, "soft_cap": soft_cap, "sinks": True, "head_dim": head_dim})
    for window, soft_cap, head_dim in itertools.product(
        (None, 1, 128, 1000), (None, 30.0), (64, 128)
    )
]


@on_both("pieces", "options", gpu=ON_GPU, small=SMALL)
def test_kernel_equals_float32(
    device: torch.device, pieces: Pieces, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        emulator.install(monkeypatch, sm_count=SM_COUNT)
    Attention(device, pieces, **options).check(LAUNCHES if device.type == "cpu" else 10)


@on_both("options", gpu=[({"head_dim": 128},)], small=[({},)])
@pytest.mark.parametrize("e4m3", (False, True))
def test_a_chunk_has_bits_of_its_own(
    device: torch.device, options: dict[str, Any], e4m3: bool
) -> None:
    """Whatever is beside it, and wherever in the step it lies."""
    attention = Attention(device, [(0, 60), (133, 77), (64, 40)], **options, e4m3=e4m3, padding=100)
    case, out = attention.case, attention.run()
    for slot, first, length, start in case.chunks[:3].tolist():
        for place in (0, 29):
            query = torch.zeros_like(case.query)
            query[place : place + length] = case.query[first : first + length]
            entries = [(slot, place, length, start), (0, query.shape[0], 0, 0)]
            chunks = torch.tensor(entries, dtype=torch.int32, device=device)
            alone = attention.run(replace(case, query=query, chunks=chunks))
            assert torch.equal(alone[place : place + length], out[first : first + length])


@on_both("scale", gpu=[(1e-30,), (1.0,), (1e30,)], small=[(1e-30,), (1e30,)])
def test_queries_over_e4m3_may_have_any_size(device: torch.device, scale: float) -> None:
    """Beyond what float16 holds, and some rows of zeros."""
    attention = Attention(device, [(0, 20)], e4m3=True)
    case = attention.case
    query = case.query * scale
    query[5:9] = 0
    attention.case = replace(case, query=query, scale=case.scale / scale)
    attention.check()


@on_both("e4m3", gpu=[(False,), (True,)], small=[(False,), (True,)])
def test_a_value_that_is_not_a_number_is_seen(device: torch.device, e4m3: bool) -> None:
    attention = Attention(device, [(0, 20)], e4m3=e4m3, block_size=16, decode_rows=0)
    case = attention.case
    values = case.values.float()
    values[case.table[0, 0], 7, 0, 3] = torch.nan
    attention.case = replace(case, values=values.to(case.values.dtype))
    broken = attention.run()[:20].isnan()
    assert broken[7:, :, 3].all()
    assert not broken[..., :3].any() and not broken[..., 4:].any()


@emulated
def test_a_step_without_tokens_or_chunks_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(prefill_attention, "kernel", None)
    attention = Attention(torch.device("cpu"), [(0, 4)])
    case = attention.case
    assert (attention.run(replace(case, chunks=case.chunks[:0])) == UNTOUCHED).all()
    assert attention.run(replace(case, query=case.query[:0])).shape[0] == 0


@emulated
def test_chunks_without_tokens_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(0, 4)])
    empty = replace(attention.case, chunks=torch.zeros(3, 4, dtype=torch.int32))
    assert (attention.run(empty) == UNTOUCHED).all()


@emulated
def test_queries_may_be_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(3, 20)])
    expected = attention.run()
    query = attention.case.query
    beside = torch.cat([query, query], dim=1)[:, : query.shape[1]]
    shifted = torch.cat([query[..., :1], query], dim=2)[..., 1:]
    misplaced = torch.cat([query.new_zeros(1), query.flatten()])[1:].view(query.shape)
    for strided in (beside, shifted, misplaced):
        assert torch.equal(attention.run(replace(attention.case, query=strided)), expected)


@emulated
def test_sinks_may_be_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(3, 20)], sinks=True)
    expected, sinks = attention.run(), attention.limits["sinks"]
    attention.limits["sinks"] = sinks.repeat_interleave(2)[::2]
    assert torch.equal(attention.run(), expected)


@emulated
@pytest.mark.parametrize("scale", (0.0, -0.3))
@pytest.mark.parametrize("limits", ({}, {"soft_cap": 2.0}, {"e4m3": True}))
def test_a_scale_need_not_be_positive(
    scale: float, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(3, 20)], **limits)
    attention.case = replace(attention.case, scale=scale)
    attention.check()


@emulated
@pytest.mark.parametrize("window", (2**31 - 1, 2**40))
def test_a_window_may_be_larger_than_any_sequence(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(120, 40)])
    attention.limits["window"] = window
    attention.check()


@emulated
def test_a_dimension_of_one_may_have_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    attention = Attention(torch.device("cpu"), [(3, 20)])
    case, expected = attention.case, attention.run()
    blocks, tokens, _, size = case.keys.shape
    for odd in (1, 1 << 45):
        keys, values = (
            x.as_strided((blocks, tokens, 1, size), (x.stride(0), x.stride(1), odd, 1))
            for x in (case.keys, case.values)
        )
        assert torch.equal(attention.run(replace(case, keys=keys, values=values)), expected)


def test_caches_that_tma_cannot_read_are_refused() -> None:
    case = Attention(torch.device("cpu"), [(3, 20)]).case
    wide = torch.zeros(*case.keys.shape[:3], 72, dtype=BF16)
    for cache, is_taken in (
        (wide[..., :64], True), (wide[..., 8:], True), (wide[..., 4:68], False),
        (torch.zeros(*case.keys.shape[:3], 68, dtype=BF16)[..., :64], False),
        (torch.zeros(*case.keys.shape[:3], 72, dtype=E4M3)[..., :64], False),
        (wide.mT[..., :64, :].mT[..., ::2], False),
    ):  # fmt: skip
        assert has_map(cache) == is_taken
        if not is_taken:
            with pytest.raises(ValueError, match="multiples of 16 bytes"):
                prefill_attention.prefill_attention(
                    case.query, case.keys, cache, case.table, case.chunks, case.scale, case.query
                )


@pytest.mark.parametrize(
    ("shape", "strides", "is_found"),
    [
        ((9, 4, 64), (256, 64, 1), True),
        ((9, 4, 64), (256, 68, 1), False),
        ((9, 4, 64), (260, 64, 1), False),
        ((1, 4, 64), (1, 64, 1), True),
        ((9, 1, 64), (64, 1, 1), True),
        # Offsets within a token have 32 bits.
        ((9, 3, 64), (64, 1 << 30, 1), False),
        ((9, 2, 64), (64, 1 << 30, 1), True),
        ((9, 2, 64), (1 << 31, 64, 1), False),
    ],
)
def test_which_heads_the_kernel_finds(
    shape: tuple[int, ...], strides: tuple[int, ...], is_found: bool
) -> None:
    heads = torch.empty_strided(shape, strides, dtype=BF16, device="meta")
    assert is_addressed(heads) == is_found


def test_what_the_kernel_would_read_wrongly_is_refused() -> None:
    case = Attention(torch.device("cpu"), [(3, 20)]).case
    given = (case.query, case.keys, case.values, case.table, case.chunks, case.scale)
    wide = torch.empty(*case.query.shape[:2], 65, dtype=BF16)
    for out in (wide[..., 1:], torch.empty(*case.query.shape, 2, dtype=BF16)[..., 0]):
        with pytest.raises(ValueError, match=r"16 bytes|contiguous"):
            prefill_attention.prefill_attention(*given, out)
    with pytest.raises(ValueError, match="chunk table"):
        prefill_attention.prefill_attention(*given[:4], case.chunks.t(), case.scale, wide[..., :64])


@pytest.mark.parametrize("wrong", [-1, 10**6])
@on_both("options", gpu=[({},), ({"e4m3": True},)], small=[({},), ({"e4m3": True},)])
def test_what_is_no_block_is_read_as_zeros(
    device: torch.device, options: dict[str, Any], wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a block of the table that the cache does not have."""
    if device.type == "cpu":
        emulator.install(monkeypatch, sm_count=SM_COUNT)
    attention = Attention(device, [(130, 60), (0, 80)], **options)
    case = attention.case
    slot = case.chunks[0, 0]
    caches = (case.keys, case.values)
    with_zeros = [torch.cat((each, torch.zeros_like(each[:1]))) for each in caches]
    tables = [case.table.clone(), case.table.clone()]
    tables[0][slot, 1], tables[1][slot, 1] = wrong, len(case.keys)
    expected = attention.run(
        replace(case, keys=with_zeros[0], values=with_zeros[1], table=tables[1])
    )
    assert torch.equal(attention.run(replace(case, table=tables[0])), expected)
    assert not torch.equal(expected, attention.run())


def test_a_cpu_is_left_to_the_reference() -> None:
    case = Attention(torch.device("cpu"), [(3, 20)]).case
    assert why_not(case.query, case.keys) == "it runs on a GPU"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_what_it_takes_on_a_gpu(device: str) -> None:
    def taken(head_dim: int = 64, block_size: int = 64, **options: Any) -> bool:
        dtype, cache = options.pop("dtype", BF16), options.pop("cache", BF16)
        query = torch.zeros(3, 4, head_dim, dtype=dtype, device=device)
        keys = torch.zeros(2, block_size, 2, head_dim, dtype=cache, device=device)
        return why_not(query, keys, **options) is None

    sinks = torch.zeros(4, device=device, dtype=BF16)
    assert taken() and taken(256) and taken(block_size=16) and taken(cache=E4M3)
    assert taken(dtype=HALF, cache=HALF) and taken(sinks=sinks)
    assert not taken(264) and not taken(dtype=torch.float32, cache=torch.float32)
    assert not taken(block_size=8) and not taken(latent=64) and not taken(dtype=HALF, cache=E4M3)
    assert not taken(dtype=HALF, cache=HALF, sinks=sinks) and not taken(sinks=sinks.half())
    assert taken(24) and not taken(24, cache=E4M3)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_captured_kernel_follows_its_inputs(device: str) -> None:
    attention = Attention(torch.device(device), [(0, 100), (333, 77)], head_dim=128)
    case, out = attention.case, torch.full_like(attention.case.query, UNTOUCHED)
    given = (case.query, case.keys, case.values, case.table, case.chunks, case.scale, out)
    prefill_attention.prefill_attention(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention.prefill_attention(*given)
    case.query.normal_()
    case.chunks[0, 2], case.chunks[1] = 20, torch.tensor([case.chunks[1, 0], 40, 10, 400])
    out.fill_(UNTOUCHED)
    graph.replay()
    assert torch.equal(out, attention.run())
    torch.testing.assert_close(out.float(), attention.expected(), rtol=1.6e-2, atol=1.6e-2)


_SUMS, _FREE = "await_wgmma<PADDED>(sums);", "free_stage(VALUES_FREE, value_stage, values_passed);"
_QUERY, _KEYS = (
    "await_bytes(base + QUERY_FREE + stage * 8, passed);",
    "await_wgmma<KEYS, 1>(scores);",
)
_STORE = "if (row < from || row >= to) store"
_RAW = "arrive_at(full), arrive_at(base + RAW_FREE + raw_stage * 8)"
_FENCE = "begin_wgmma();\n        "
_PUBLISH = "publish_stores();"
_PUBLISH_QUERIES = "await_copies<0>();\n      publish_stores();"
_VALUES_THERE = "await_bytes(base + VALUES_FULL + value_stage * 8, values_passed);"
_EIGHT = "\n" + 8 * " "
_TALL: Pieces = [(0, 600)]
FAULTS: dict[str, tuple[str, str, Pieces, dict[str, Any]]] = {
    "values behind the end": (_STORE, "if (row < from) store", RAGGED, {}),
    "values before the window": (_STORE, "if (row >= to) store", [(300, 40)], {"window": 50}),
    "raw values": (
        "if (!whole && (row < from || row >= to))", "if (false)", RAGGED, {"e4m3": True},
    ),
    "scores before their products": (_KEYS, "await_wgmma<KEYS, 2>(scores);", _TALL, {}),
    "values freed early": (_SUMS + _EIGHT + _FREE, _FREE + _EIGHT + _SUMS, _TALL, {}),
    "sums before their products": (_SUMS + _EIGHT + _FREE, _FREE, _TALL, {}),
    "no turns": ("if (group == 2) arrive_named(1, 256);", "", _TALL, {}),
    "keys of all tokens": ("begins + KEYS - 1 > least", "begins > greatest", RAGGED, {}),
    "keys before the window": (
        "begins <= greatest - window", "begins <= least - window", [(300, 40)], {"window": 200},
    ),
    "sinks of all lanes": ("if (t == 0) mass", "mass", RAGGED, {"sinks": True}),
    "sums that do not fade": ("sums[j] *= faded[j % 4 / 2];", ";", _TALL, {}),
    "queries over those of another tile": (_QUERY + "\n      __syncwarp();", "", _TALL, {}),
    "queries that are not published": (_PUBLISH_QUERIES, "await_copies<0>();", RAGGED, {}),
    "zeros that are not published": (
        _PUBLISH + _EIGHT + "  __syncwarp();" + _EIGHT + "  if (lane == 0) arrive_at(full);",
        "__syncwarp();" + _EIGHT + "  if (lane == 0) arrive_at(full);", RAGGED, {},
    ),
    "wide values that are not published": (
        _PUBLISH + "\n      __syncwarp();\n      if (lane == 0) " + _RAW,
        "__syncwarp();\n      if (lane == 0) " + _RAW, RAGGED, {"e4m3": True},
    ),
    "scaled queries that are not published": (
        _PUBLISH + "\n      sync_named(2 + group, 128);", "sync_named(2 + group, 128);",
        RAGGED, {"e4m3": True},
    ),
    "products without a fence": (_FENCE + "multiply_keys();", "multiply_keys();", _TALL, {}),
    "values before they are there": (
        _VALUES_THERE + _EIGHT + "__syncwarp();" + _EIGHT + "add_values();",
        "add_values();" + _EIGHT + _VALUES_THERE + _EIGHT + "__syncwarp();", _TALL, {},
    ),
    "raw stages that stay full": (_RAW, "arrive_at(full)", _TALL, {"e4m3": True}),
    "queries of one scale": ("own_scale[i] *= query_scales[row[i]];", ";", RAGGED, {"e4m3": True}),
    "tiles of another chunk": ("if (own) tile -= before;", "tile -= before;", RAGGED, {}),
    "rounds that go forth only": (
        "(n % 2 ? ctas - 1 - (int)blockIdx.x : (int)blockIdx.x)", "ctas - 1", _TALL, {},
    ),
}  # fmt: skip
"""Text and what takes its place, and chunks that notice."""


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    there, instead, pieces, options = FAULTS[fault]
    emulator.install(monkeypatch, sm_count=SM_COUNT)
    text = emulator.source_text("prefill_attention")
    assert text.count(there) == 1
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    built: list[emulator.EmulatedKernel] = []

    def kernel(source: str, macros: dict[str, int], _: torch.device) -> emulator.EmulatedKernel:
        if not built:
            built.append(emulator.EmulatedKernel(source, macros))
        return built[0]  # whose next launch has another order

    monkeypatch.setattr(prefill_attention, "kernel", kernel)
    with pytest.raises(AssertionError):
        Attention(torch.device("cpu"), pieces, **options).check(LAUNCHES)


def test_a_form_has_the_tiles_that_fit() -> None:
    sizes = itertools.product(range(8, 264, 8), (BF16, E4M3, HALF))
    forms = [Form(head_dim, 4, 64, cache).defines() for head_dim, cache in sizes]
    taken = emulator.shared_bytes("prefill_attention", forms)
    assert max(taken) <= HOPPER_BYTES
    assert min(taken) >= 2 * 2 * 64 * 64 * 2  # keys and values, two tiles of each
