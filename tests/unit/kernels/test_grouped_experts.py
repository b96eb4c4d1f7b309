"""Grouped GEMMs of the experts of many tokens against their reference in torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm.invariant.mode import batch_invariant_mode
from megatron_async.kernels.moe.mxfp4 import pack, unpack
from megatron_async.kernels.moe.reference import NO_EXPERT, Routing, expert_mlp
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.models.moe.compute import KeptWeights, grouped_takes
from megatron_async.models.moe.quantized import expert_mlp as expert_mlp_in_e4m3
from megatron_async.models.quantized.values import E4M3, PACKED, multiply_out, quantize
from tests.support.compiled_kernels import HOPPER, LIMIT_OF, Compiled, compiles, compiling_for
from tests.support.cuda_kernels import LIMIT, relative_error
from tests.support.interpreter import HAS_TRITON, compiled, on_devices
from tests.support.sweeps import some

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.moe import grouped
    from megatron_async.kernels.moe.grouped import (
        TILES,
        WIDENED_TILES,
        GroupedTile,
        GroupedTiles,
        GroupedWeights,
        choose_tiles,
        grouped_experts,
        tiles_for,
    )
    from megatron_async.kernels.moe.many import order as slot_order
    from megatron_async.kernels.moe.many import wide as wide_products
    from megatron_async.kernels.moe.many.order import most_tiles, order_slots
    from megatron_async.kernels.moe.many.wide import WideTiles

SWIGLU = ExpertActivation()
GPT_OSS = ExpertActivation(function="quick_gelu", limit=1.0, offset=1.0)
RELU2 = ExpertActivation(function="squared_relu", gated=False)
on_cuda = pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])


class Sizes(NamedTuple):
    """Of a layer."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: ExpertActivation
    bias: bool = False


LARGE = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768, SWIGLU),
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880, GPT_OSS, True),
}


class Layer:
    """Drawn weights, and rows with drawn experts; some are dead."""

    def __init__(
        self, sizes: Sizes, tokens: int, device: str, dtype: torch.dtype, held: int | None = None
    ) -> None:
        experts, top_k, hidden, inner, activation, bias = sizes
        generator = torch.Generator(device).manual_seed(tokens)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=dtype)

        first = 2 * inner if activation.gated else inner
        self.activation, self.experts = activation, experts
        self.wide = self.weights = GroupedWeights(
            drawn(held or experts, first, hidden) / hidden**0.5,
            drawn(held or experts, hidden, inner) / inner**0.5,
            drawn(held or experts, first) if bias else None,
            drawn(held or experts, hidden) if bias else None,
        )
        self.hidden = drawn(tokens, hidden)
        scores = torch.rand(tokens, experts, generator=generator, device=device)
        ids = scores.topk(top_k).indices.int()
        self.dead = torch.arange(tokens, device=device) % 7 == 3
        ids = ids.masked_fill(self.dead[:, None] | (ids >= (held or experts)), NO_EXPERT)
        weights = torch.rand(ids.shape, generator=generator, device=device)
        self.routing = Routing(ids, weights)

    def run(
        self,
        tiles: GroupedTiles | None = None,
        rows: slice = slice(None),
        *,
        quantizes: bool = False,
    ) -> Tensor:
        return grouped_experts(
            self.hidden[rows], Routing(*(part[rows] for part in self.routing)), self.weights,
            self.activation, num_experts=self.experts, tiles=tiles, quantizes=quantizes,
        )  # fmt: skip

    def expected(self) -> Tensor:
        w1, w2, b1, b2, *_ = self.wide
        return expert_mlp(self.hidden, self.routing, w1, w2, self.activation, b1=b1, b2=b2)

    def keep(self, kind: str) -> None:
        """Have the weights as MXFP4, or as e4m3 with a scale a row or for 32 columns."""
        w1, w2, b1, b2, *_ = self.weights
        if kind == "mxfp4":
            pairs = [pack(w1), pack(w2)]
            wide = [unpack(*pair) for pair in pairs]
        else:
            pairs = [quantize(w, w.shape[-1] // 32 if kind == "groups" else 1) for w in (w1, w2)]
            wide = [multiply_out(*pair, torch.float32) for pair in pairs]
        (first, one), (second, other) = pairs
        self.weights = GroupedWeights(first, second, b1, b2, one, other)
        self.wide = GroupedWeights(*(w.to(self.hidden.dtype) for w in wide), b1, b2)

    def check(self, limit: float, tiles: GroupedTiles | None = None) -> None:
        found = self.run(tiles)
        assert relative_error(found, self.expected().double()) < limit
        assert not found[self.dead].any()
        if found.is_cuda:
            assert torch.equal(found, self.run(tiles)), "bits depend on when programs run"


def checked_order(ids: Tensor, experts: int, rows: int) -> None:
    """The order is that of a stable sort, and tiles have each row of an expert once."""
    order, flat = order_slots(ids, experts, rows), ids.flatten()
    sorted_ids, slots = flat.sort(stable=True)
    count = int((flat >= 0).sum())
    assert torch.equal(order.slots[:count].long(), slots[sorted_ids >= 0])
    found: list[tuple[int, int, int]] = []
    begin = 0
    for expert in range(experts):
        end = begin + int((flat == expert).sum())
        found += [(expert, first, end) for first in range(begin, end, rows)]
        begin = end
    tiles = order.tiles.t().tolist()
    assert [tuple(tile) for tile in tiles[: len(found)]] == found
    assert all(tile[0] == -1 for tile in tiles[len(found) :])
    there = order.tiles.storage_offset() + order.tiles.numel()
    behind = torch.as_strided(order.tiles, (1,), (1,), there)
    assert behind.tolist() == [len(found)]


@on_devices
@pytest.mark.parametrize("rows", [16, 32])
def test_slots_are_ordered_by_expert(
    device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_order, "_LEAST_CHUNK", 64)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, 18, (50, 3), generator=generator).int()
    ids[ids == 5] = 4  # an expert without tokens
    for given in (ids, torch.full_like(ids, 17), torch.full_like(ids, NO_EXPERT), ids[:1]):
        checked_order(given.to(device), 18, rows)


@on_cuda
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(300, 512, 16), (32768, 128, 8)])
def test_many_slots_are_ordered_by_expert(
    device: str, tokens: int, experts: int, top_k: int
) -> None:
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator, device=device).int()
    checked_order(ids, experts, 64)


def test_there_are_never_more_tiles() -> None:
    """One expert for each, and the others in whole tiles."""
    for experts, rows in ((4, 16), (3, 2)):
        for slots in range(1, 40):
            worst = [1] * min(slots, experts)
            worst[0] += slots - sum(worst)
            found = sum(-(-count // rows) for count in worst)
            assert found <= most_tiles(slots, experts, rows) <= slots
    assert most_tiles(2 + 16, 2, 16) == 3


def one_tile(m: int, n: int, k: int, *, swap: bool = False) -> GroupedTiles:
    tile = GroupedTile(n, k, 3, 4, swap)
    return GroupedTiles(m, tile, tile)


# Sizes that tiles divide and not, one program's tiles and several, both orders of operands.
CASES: Any = (
    (Sizes(5, 2, 48, 40, SWIGLU), (16, 64, 32)),
    (Sizes(3, 2, 64, 24, GPT_OSS, True), (16, 32, 32)),
    (Sizes(2, 1, 40, 48, RELU2), (16, 64, 64)),
)


@on_devices
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_small_layers(device: str, case: int, swap: bool) -> None:
    sizes, tile = CASES[case]
    tiles = one_tile(*tile, swap=swap)
    Layer(sizes, 29, device, torch.float32).check(1e-5, tiles)
    if case == 1 and swap:
        Layer(sizes, 29, device, torch.bfloat16).check(LIMIT, tiles)
        Layer(sizes, 29, device, torch.float32, held=2).check(1e-5, tiles)


@on_devices
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", ["mxfp4", "rows", "groups"])
def test_small_layers_of_other_formats(device: str, kind: str, swap: bool) -> None:
    """Steps that are ragged and not, and scales that differ within a row."""
    layer = Layer(Sizes(3, 2, 96, 64, GPT_OSS, True), 21, device, torch.bfloat16)
    layer.keep(kind)
    layer.check(LIMIT, one_tile(16, 32, 32 if kind == "groups" else 64, swap=swap))


def wide_tiles(m: int, n: int, k: int) -> GroupedTiles:
    return GroupedTiles(m, TILES[-1].up, TILES[-1].down, WideTiles(m, n, k, 3, 4))


# A tile's first half and all of it, several programs' tiles, and columns that tiles do not divide.
WIDE_CASES: Any = (
    (Sizes(5, 2, 48, 40, SWIGLU), 29),
    (Sizes(3, 2, 64, 24, GPT_OSS, True), 60),
    (Sizes(2, 1, 32, 56, SWIGLU), 9),
)


@on_devices
@pytest.mark.parametrize("case", range(len(WIDE_CASES)))
def test_small_layers_with_tma(device: str, case: int) -> None:
    sizes, tokens = WIDE_CASES[case]
    tiles = wide_tiles(32, 64, 16)
    if device == "cpu":  # a GPU's products of float32 are of tf32, and no engine asks for them
        Layer(sizes, tokens, device, torch.float32).check(1e-5, tiles)
    layer = Layer(sizes, tokens, device, torch.bfloat16)
    layer.check(LIMIT, tiles)
    together = layer.run(tiles)
    assert torch.equal(layer.run(tiles, slice(3, 8)), together[3:8])
    if case == 1:
        Layer(sizes, tokens, device, torch.bfloat16, held=2).check(LIMIT, tiles)
        layer.routing.ids.fill_(NO_EXPERT)
        assert not layer.run(tiles).any()


def test_what_tma_takes() -> None:
    def takes(hidden: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> bool:
        weight = torch.empty(2, 64, hidden, dtype=dtype)
        return wide_products.takes(weight, **{"gated": True, "limit": LIMIT_OF[HOPPER], **options})

    assert takes(2880) and not takes(2880 + 32) and not takes(64, E4M3)
    assert not takes(64, gated=False) and not takes(64, limit=102400)


@on_cuda
@pytest.mark.parametrize("name", LARGE)
def test_tma_changes_no_bits(device: str, name: str) -> None:
    layer = Layer(LARGE[name], 1000, device, torch.bfloat16)
    chosen = tiles_for(layer.weights, layer.hidden, 99.0)
    assert chosen.wide is not None
    assert torch.equal(layer.run(chosen), layer.run(TILES[-1]))


@on_devices
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_rows_in_e4m3(device: str, kind: str, swap: bool) -> None:
    """Beside the definition, and beside inputs that are not rounded. In float32, where nothing else
    rounds; a GPU adds e4m3 up in fewer bits, so that another number may be the nearest."""
    layer = Layer(Sizes(3, 2, 96, 64, GPT_OSS, True), 21, device, torch.float32)
    layer.keep(kind)
    tiles = one_tile(16, 32, 32 if kind == "groups" else 64, swap=swap)
    found = layer.run(tiles, quantizes=True)
    cpu = KeptWeights(*(None if part is None else part.cpu() for part in layer.weights))
    routing = Routing(*(part.cpu() for part in layer.routing))
    meant = expert_mlp_in_e4m3(layer.hidden.cpu(), routing, cpu, layer.activation).double()
    assert relative_error(found.cpu(), meant) < (1e-4 if device == "cpu" else 5e-3)
    assert relative_error(layer.run(tiles).cpu(), meant) > 1.2e-2
    assert not found[layer.dead].any()
    assert torch.equal(found, layer.run(tiles, quantizes=True))
    together = layer.run(tiles, slice(4, 11), quantizes=True)
    assert torch.equal(together, found[4:11])


@on_devices
def test_a_rows_bits_do_not_depend_on_the_other_rows(device: str) -> None:
    layer, tiles = Layer(CASES[1][0], 29, device, torch.bfloat16), one_tile(16, 64, 64)
    together = layer.run(tiles)
    for rows in (slice(1), slice(5, 21)):
        assert torch.equal(layer.run(tiles, rows), together[rows])


@on_devices
def test_rows_that_are_not_finite_stay_alone(device: str) -> None:
    """Dead rows reach nobody, and other rows of an expert neither."""
    layer, tiles = Layer(CASES[1][0], 9, device, torch.float32), one_tile(16, 64, 64)
    expected = layer.run(tiles)
    layer.hidden[3], layer.hidden[6] = torch.nan, torch.inf
    found, others = layer.run(tiles), torch.arange(9) != 6
    assert torch.equal(found[others], expected[others]) and not found[6].isfinite().all()


TOKENS = [65, 128, 256, 1024, 4096]


@on_cuda
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LARGE)
def test_large_layers(device: str, name: str, tokens: int) -> None:
    Layer(LARGE[name], tokens, device, torch.bfloat16).check(LIMIT)


@on_cuda
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["mxfp4", "rows", "groups"])
@pytest.mark.parametrize("name", LARGE)
def test_large_layers_of_other_formats(device: str, name: str, kind: str, tokens: int) -> None:
    layer = Layer(LARGE[name], tokens, device, torch.bfloat16)
    layer.keep(kind)
    layer.check(LIMIT)


@on_cuda
@pytest.mark.parametrize("kind", ["rows", "groups"])
@pytest.mark.parametrize("number", range(4))
def test_tiles_of_rows_in_e4m3_give_the_definition(device: str, number: int, kind: str) -> None:
    layer = Layer(Sizes(4, 2, 1024, 768, SWIGLU), 300, device, torch.float32)
    layer.keep(kind)
    columns = (32, 32) if kind == "groups" else (0, 0)
    tiles = choose_tiles(number, 1, LIMIT_OF[HOPPER], None, columns)
    found = layer.run(tiles, quantizes=True)
    cpu = KeptWeights(*(None if part is None else part.cpu() for part in layer.weights))
    routing = Routing(*(part.cpu() for part in layer.routing))
    meant = expert_mlp_in_e4m3(layer.hidden.cpu(), routing, cpu, layer.activation).double()
    assert relative_error(found.cpu(), meant) < 5e-3


@on_cuda
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["rows", "groups"])
@pytest.mark.parametrize("name", LARGE)
def test_large_layers_with_rows_in_e4m3(device: str, name: str, kind: str, tokens: int) -> None:
    layer = Layer(LARGE[name], tokens, device, torch.bfloat16)
    layer.keep(kind)
    found, wide = layer.run(quantizes=True), layer.run().double()
    assert 1e-2 < relative_error(found, wide) < 8e-2, "what e4m3 rounds, and no more"
    for _ in range(5):
        assert torch.equal(layer.run(quantizes=True), found)


@on_cuda
@pytest.mark.parametrize("tokens", [65, 512, 1024, 8192])
@pytest.mark.parametrize("kind", ["mxfp4", "rows", "groups"])
def test_widened_weights_give_the_same_bits_twenty_times(
    device: str, kind: str, tokens: int
) -> None:
    """Registers of a product in flight were written once; how many, timing decided."""
    layer = Layer(LARGE["qwen3-30b-a3b"], tokens, device, torch.bfloat16)
    layer.keep(kind)
    first = layer.run()
    assert relative_error(first, layer.expected().double()) < LIMIT
    for _ in range(20):
        assert torch.equal(layer.run(), first)


@on_cuda
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", LARGE)
def test_all_tiles_at_large_sizes(device: str, name: str, number: int) -> None:
    layer = Layer(LARGE[name], 300, device, torch.bfloat16)
    layer.check(LIMIT, TILES[number])
    together = layer.run(TILES[number])
    assert torch.equal(layer.run(TILES[number], slice(100, 177)), together[100:177])


@on_cuda
@pytest.mark.parametrize("name", LARGE)
def test_all_tokens_have_one_expert(device: str, name: str) -> None:
    layer = Layer(LARGE[name], 256, device, torch.bfloat16)
    layer.routing.ids.copy_(torch.where(layer.routing.ids < 0, NO_EXPERT, 7))
    layer.check(LIMIT)
    layer.routing.ids.fill_(NO_EXPERT)
    assert not layer.run().any()


@on_cuda
def test_a_rank_has_some_of_the_experts(device: str) -> None:
    Layer(LARGE["qwen3-30b-a3b"], 512, device, torch.bfloat16, held=32).check(LIMIT)


@on_cuda
def test_in_a_graph_nothing_waits_for_the_host(device: str) -> None:
    layer = Layer(LARGE["qwen3-30b-a3b"], 128, device, torch.bfloat16)
    expected = layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
    for part in (layer.hidden, *layer.routing):  # the next replay sorts otherwise
        part.copy_(part.flip(0))
    graph.replay()
    assert torch.equal(out, expected.flip(0))


def compiled_products(
    name: str, kind: str, number: int, *, quantizes: bool = False
) -> list[tuple[Compiled, int]]:
    """The two grouped GEMMs of a large layer for Hopper, each with the bound of its tile."""
    experts, top_k, hidden, inner, activation, bias = LARGE[name]

    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    def kept(rows: int, length: int) -> tuple[Tensor, Tensor | None]:
        if kind == "bfloat16":
            return meta(experts, rows, length), None
        if kind == "mxfp4":
            sizes, dtype = (length // 2, length // 32), torch.uint8
            return meta(experts, rows, sizes[0], dtype=dtype), meta(
                experts, rows, sizes[1], dtype=dtype
            )
        groups = 1 if kind == "rows" else length // 32
        scale = meta(experts, rows, groups, dtype=torch.float32)
        return meta(experts, rows, length, dtype=torch.float8_e4m3fn), scale

    (w1, one), (w2, other) = kept(2 * inner, hidden), kept(hidden, inner)
    b1, b2 = (meta(experts, size) if bias else None for size in (2 * inner, hidden))
    weights = GroupedWeights(w1, w2, b1, b2, one, other)
    routing = Routing(meta(128, top_k, dtype=torch.int32), meta(128, top_k, dtype=torch.float32))
    tiles = tiles_for(weights, meta(1, hidden), (1, 15, 30, 99)[number], quantizes=quantizes)
    with compiling_for(HOPPER) as found:
        grouped_experts(
            meta(128, hidden), routing, weights, activation, tiles=tiles, quantizes=quantizes
        )
    size = None if quantizes else {"bfloat16": None, "mxfp4": 0.5}.get(kind, 1.0)
    bounds = [
        grouped.shared_bytes(tile, tiles.m, 1 if quantizes else 2, LIMIT_OF[HOPPER], size)
        for tile in (tiles.up, tiles.down)
    ]
    if tiles.wide is not None:
        bounds = 2 * [tiles.wide.shared_bytes]
    products = [kernel for kernel in found if kernel.name.startswith("grouped_")]
    return list(zip(products, bounds, strict=True))


ALL_COMPILED = [
    (name, kind, number)
    for name in LARGE
    for kind in ("bfloat16", "mxfp4", "rows", "groups")
    for number in range(4)
]


@compiles
@pytest.mark.parametrize(("name", "kind", "number"), some(ALL_COMPILED, 1))
def test_tiles_fit_a_gpu(
    name: str, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for Hopper they take no more than the bound says, and use its tensor cores."""
    monkeypatch.setattr(slot_order, "uses_pdl", lambda device: True)
    for kernel, bound in compiled_products(name, kind, number):
        assert kernel.shared <= bound <= LIMIT_OF[HOPPER], kernel.name
        assert ("wgmma" in kernel.ptx) == (kind != "bfloat16" or number > 0)
        assert "griddepcontrol.wait" in kernel.ptx and ".local" not in kernel.ptx


@compiles
@pytest.mark.parametrize(
    ("name", "kind", "number"),
    some([case for case in ALL_COMPILED if case[1] in ("rows", "groups")], 1),
)
def test_tiles_of_rows_in_e4m3_fit_a_gpu(
    name: str, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_order, "uses_pdl", lambda device: True)
    for kernel, bound in compiled_products(name, kind, number, quantizes=True):
        assert kernel.shared <= bound <= LIMIT_OF[HOPPER], kernel.name
        assert "f32.e4m3.e4m3" in kernel.ptx and "wgmma" in kernel.ptx
        assert ".local" not in kernel.ptx


@compiles
def test_products_of_mxfp4_end_before_their_registers_are_written() -> None:
    """What :func:`compiling_for` checks, of the tile that gave other bits from run to run."""
    for kernel, _ in compiled_products("qwen3-30b-a3b", "mxfp4", 3):
        assert "m64n128k16" in kernel.ptx


def test_tiles_follow_the_tokens_of_an_expert() -> None:
    limit, few = LIMIT_OF[HOPPER], torch.empty(1, 64, dtype=torch.bfloat16)
    wide = GroupedWeights(few[None], few[None])
    rows = [tiles_for(wide, few, mean).m for mean in (0.5, 8, 16, 32, 64, 2048)]
    assert rows == [16, 16, 32, 64, 128, 128]
    for number in range(4):
        assert choose_tiles(number, 2, limit) == TILES[number], "what fits is taken"
        assert choose_tiles(number, 2, limit, 0.5) == WIDENED_TILES[number]
        for size in (None, 0.5, 1.0):
            small = choose_tiles(number, 2, 65_536, size)
            assert grouped.shared_bytes(small.up, small.m, 2, 65_536, size) <= 65_536
        assert choose_tiles(number, 2, limit, 1.0, (32, 0)).up.k == 32


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def there(*size: int, **options: Any) -> Tensor:
        return torch.empty(*size, **{"dtype": torch.bfloat16, **options}).as_subclass(OnGpu)

    def takes(x: Tensor, w1: Tensor, w2: Tensor, *scales: Tensor | None) -> bool:
        one, other = scales or (None, None)
        return grouped_takes(x, KeptWeights(w1, w2, None, None, one, other))

    x, first, second = there(65, 64), there(4, 32, 64), there(4, 64, 16)
    monkeypatch.setattr(trial, "GROUPED_EXPERTS", False)
    assert not takes(x, first, second)
    monkeypatch.setattr(trial, "GROUPED_EXPERTS", True)
    assert takes(x, first, second)
    assert not takes(there(64, 64), first, second), "few tokens"
    assert not takes(torch.empty(65, 64, dtype=torch.bfloat16), first, second), "the CPU"
    assert not takes(there(65, 64, dtype=torch.float16), first, second)
    assert not takes(x, there(4, 24, 60), there(4, 60, 12)), "where rows begin"
    assert not takes(x, there(4, 64, 32).mT, second)
    trained = there(4, 32, 64, requires_grad=True)
    assert not takes(x, trained, second)
    with torch.no_grad():
        assert takes(x, trained, second)
    with batch_invariant_mode():
        assert not takes(x, first, second)
    numbers = there(4, 32, 64, dtype=E4M3), there(4, 64, 16, dtype=E4M3)
    of_row = there(4, 32, 1, dtype=torch.float32), there(4, 64, 1, dtype=torch.float32)
    assert takes(x, *numbers, *of_row)
    assert not takes(x, numbers[0], second, of_row[0], None), "two formats"
    assert not takes(x, *numbers, there(4, 32, 8, dtype=torch.float32), of_row[1])
    packed = there(4, 32, 32, dtype=PACKED), there(4, 64, 16, dtype=PACKED)
    of_blocks = there(4, 32, 2, dtype=PACKED), there(4, 64, 1, dtype=PACKED)
    assert takes(x, *packed, *of_blocks)
    assert not takes(x, *packed, of_blocks[0], None)
    half = there(4, 32, 64)[..., :32].view(PACKED)
    assert not takes(x, half, packed[1], *of_blocks), "rows that are not contiguous"


@on_cuda
def test_a_layer_computes_many_tokens_with_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from megatron_async.models.moe.compute import experts_of

    monkeypatch.setattr(trial, "GROUPED_EXPERTS", True)
    layer = Layer(LARGE["qwen3-30b-a3b"], 128, device, torch.bfloat16)
    module = SimpleNamespace(
        weights=layer.wide[:4], kept_weights=KeptWeights(*layer.weights), activation=SWIGLU,
        settings=SimpleNamespace(num_experts=128),
    )  # fmt: skip
    with torch.inference_mode():
        found = experts_of(module, layer.hidden, layer.routing)
        with batch_invariant_mode():
            expected = experts_of(module, layer.hidden, layer.routing)
    assert torch.equal(found, layer.run()) and not torch.equal(found, expected)
    assert relative_error(found, expected.double()) < LIMIT
    layer.keep("rows")
    module.kept_weights, module.weights = KeptWeights(*layer.weights), layer.wide[:4]
    module.quantizes_inputs = True
    with torch.inference_mode():
        found = experts_of(module, layer.hidden, layer.routing)
        assert torch.equal(found, layer.run(quantizes=True))
        with batch_invariant_mode():
            expected = experts_of(module, layer.hidden, layer.routing)
    assert relative_error(layer.run(), expected.double()) < LIMIT, "16 bits"
    assert relative_error(found, expected.double()) > LIMIT
