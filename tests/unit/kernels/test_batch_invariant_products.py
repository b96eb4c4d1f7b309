"""The products of batch-invariant mode: routing, exactness, rows independent of each other.

On a GPU the kernel is compiled. Without one, ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.kernels.gemm.invariant import mode as batch_invariant
from megatron_async.kernels.gemm.invariant.mode import batch_invariant_mode
from megatron_async.kernels.gemm.invariant.segments import SEGMENT_STEP
from tests.support.interpreter import compiled, interpreted

try:
    from megatron_async.kernels.gemm.invariant import (
        gated_triton,
        groups_triton,
        products_triton,
        wide_triton,
    )
    from megatron_async.kernels.gemm.invariant.products_triton import Tile
    from megatron_async.kernels.norm.add_norm import add_norm
    from megatron_async.kernels.norm.swiglu import swiglu
except ImportError:
    products_triton = None  # type: ignore[assignment]


@torch.inference_mode()
def test_cpu_products_give_a_row_the_same_bits_in_any_multiple_of_8() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for columns, depth in ((80, 48), (97, 48), (48, 80), (264, 128)):
            x = torch.randn(264, depth, generator=generator).to(dtype)
            weight = torch.randn(columns, depth, generator=generator).to(dtype)
            expected = F.linear(x, weight)
            for rows in (8, 16, 24, 64, 136):
                assert torch.equal(F.linear(x[-rows:], weight), expected[-rows:])


def test_mode_leaves_the_cpu_alone_and_ends_with_its_scope() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    with batch_invariant_mode():
        inside = F.linear(x, weight)
        torch.bmm(x[None], weight.t()[None])
    assert torch.equal(inside, F.linear(x, weight))
    assert torch.overrides._get_current_function_mode() is None


PRODUCTS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, w, b: F.linear(x, w, b),
    lambda x, w, b: torch.addmm(b, x, w.t()),
    lambda x, w, b: torch.matmul(x, w.t()) + b,
    lambda x, w, b: x @ w.t() + b,
    lambda x, w, b: torch.mm(x, w.t().contiguous()) + b,
    lambda x, w, b: x.mm(w.t()) + b,
]


def test_products_in_other_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, matrices = torch.randn(24, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    ends = torch.tensor([8, 8, 19, 24], dtype=torch.int32)
    monkeypatch.setattr(batch_invariant, "_on_cuda", lambda values: True)
    with batch_invariant_mode():
        with pytest.raises(ConfigError, match="grouped_mm for rows in groups alone"):
            F.grouped_mm(rows[None].expand(4, -1, -1), matrices)
        with pytest.raises(ConfigError, match=r"no grouped_mm of torch\.float64"):
            torch._grouped_mm(rows.double(), matrices.double(), ends)


def check_groups(device: str, dtype: torch.dtype, counts: list[int], behind: int = 5) -> None:
    """Each row has the bits of a product with its group's matrix alone."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor(counts).cumsum(0).int()
    rows = int(ends[-1]) + behind
    x = torch.randn(rows, 72, generator=generator).to(device, dtype)
    matrices = torch.randn(len(counts), 40, 72, generator=generator).to(device, dtype)
    out = groups_triton.matmul_by_group(x, matrices.transpose(1, 2), ends.to(device))
    first = 0
    for matrix, count in zip(matrices, counts, strict=True):
        some = slice(first, first + count)
        assert torch.equal(out[some], products_triton.matmul_by_row(x[some], matrix.t()))
        first += count
    assert out.shape == (rows, 40) and not out[first:].any()


GROUPS = [[3, 0, 64, 65, 1, 0, 7], [0, 0, 0], [200], [1] * 9, [0, 130, 0]]


@interpreted
@pytest.mark.parametrize("counts", GROUPS)
def test_interpreted_groups(counts: list[int]) -> None:
    check_groups("cpu", torch.bfloat16, counts)


@interpreted
def test_tiles_with_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Interpreted, a tile of fewer columns of K adds up in another order."""
    products, cpu = products_triton, torch.device("cpu")
    other = products.HALF_TILE._replace(k=64)
    narrow = products.HALF_TILE_NARROW
    monkeypatch.setattr(products, "HALF_TILES", (other, products.HALF_TILE, narrow))
    monkeypatch.setattr(products, "_same", {})
    products.find_tiles(cpu, torch.bfloat16)
    assert products._same == {(cpu, torch.bfloat16): (products.HALF_TILE, narrow)}
    assert "other bits" in caplog.text and str(other) in caplog.text


@pytest.mark.skipif(products_triton is None, reason="Triton is not built here")
def test_a_tile_is_as_large_as_gives_all_multiprocessors_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products, cpu, half = products_triton, torch.device("cpu"), torch.bfloat16
    monkeypatch.setattr(products, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(products, "_same", {(cpu, half): products.HALF_TILES})
    for rows, columns, count, segments, expected in (
        (4096, 4096, 1, 1, (128, 256, False)),
        (4096, 4096, 1, 4, (128, 128, False)),
        (512, 4096, 1, 1, (128, 128, False)),
        (256, 4096, 1, 1, (128, 64, False)),
        (128, 4096, 1, 1, (64, 64, False)),
        (128, 4096, 1, 4, (128, 128, True)),
        (128, 28672, 1, 1, (128, 256, False)),
        (64, 28672, 1, 1, (64, 128, False)),
        (32, 6144, 1, 2, (64, 128, True)),
        (32, 4096, 1, 2, (64, 64, True)),
        (1, 4096, 1, 4, (64, 128, True)),
        (8, 6144, 1, 1, (64, 64, False)),
        (8, 256, 1, 1, (64, 32, False)),
        (8, 256, 1, 2, (64, 32, True)),
        (2, 1536, 128, 1, (64, 128, False)),
        (2, 1536, 128, 2, (64, 128, False)),
    ):
        tile, split = products.choose_tile(cpu, half, rows, columns, count, segments)
        assert (tile.m, tile.n, split) == expected, (rows, columns, segments)
    monkeypatch.setattr(products, "_same", {})
    assert products.choose_tile(cpu, half, 4096, 4096, 1) == (products.HALF_TILE, False)


@pytest.mark.skipif(products_triton is None, reason="Triton is not built here")
def test_segments_depend_on_the_matrix_alone_and_cover_it() -> None:
    products, half = products_triton, torch.bfloat16
    for columns, depth, expected in (
        (4096, 4096, 2), (6144, 4096, 1), (4096, 14336, 4), (28672, 4096, 1), (4096, 2047, 1),
        (4096, 2050, 2), (64, 8200, 4), (8192, 8192, 4), (8193, 8192, 1),
    ):  # fmt: skip
        segments = products.segments_of(half, columns, depth)
        size = products.segment_size(depth, segments)
        assert segments == expected and size % SEGMENT_STEP == 0
        assert segments == 1 or (segments - 1) * size < depth <= segments * size
        assert products.segments_of(torch.float32, columns, depth) == 1
    assert all(SEGMENT_STEP % tile.k == 0 for tile in products.HALF_TILES)


def check_segments(device: str, dtype: torch.dtype, depth: int, tiles: list[Tile]) -> None:
    """A program for each segment, and one for all, add up the same."""
    products = products_triton
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, depth, generator=generator).to(device, dtype)
    weight = torch.randn(40, depth, generator=generator).to(device, dtype)
    bias = torch.randn(40, generator=generator).to(device, dtype)
    segments = products.segments_of(dtype, 40, depth)
    assert segments > 1
    for tile in tiles:
        whole = products.product(x, weight.t(), bias, tile)
        assert torch.equal(products.product(x, weight.t(), bias, tile, split=True), whole), tile
        assert torch.equal(products.product(x[4:5], weight.t(), bias, tile, split=True), whole[4:5])
    exact = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-2, atol=2e-3 * depth**0.5)


@interpreted
def test_interpreted_segments() -> None:
    tile = products_triton.HALF_TILE_NARROW
    check_segments("cpu", torch.float16, 2050, [tile])
    check_segments("cpu", torch.float16, 8192, [tile])


def check_products(device: str, dtypes: tuple[torch.dtype, ...], shapes: list[tuple[int, int]],
                   counts: list[int]) -> None:  # fmt: skip
    """Against float64, and each row against itself in other numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for columns, depth in shapes:
            rows = max(counts)
            x = torch.randn(rows, depth, generator=generator).to(device, dtype)
            weight = torch.randn(columns, depth, generator=generator).to(device, dtype)
            bias = torch.randn(columns, generator=generator).to(device, dtype)
            out = products_triton.matmul_by_row(x, weight.t(), bias)
            exact = x.double() @ weight.double().t() + bias.double()
            unit = torch.finfo(dtype).eps
            scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
            accumulation = torch.finfo(torch.float32).eps * depth**0.5 * scale
            assert ((out.double() - exact).abs() <= unit * exact.abs() + accumulation).all()
            row_major = products_triton.matmul_by_row(x, weight.t().contiguous(), bias)
            assert torch.equal(row_major, out)
            for count in counts:
                for first in {0, rows - count, (rows - count) // 3}:
                    some = x[first : first + count]
                    product = products_triton.matmul_by_row(some, weight.t(), bias)
                    assert torch.equal(product, out[first : first + count]), (dtype, count, first)


@interpreted
def test_interpreted_product_gives_a_row_its_own_bits() -> None:
    dtypes = (torch.float32, torch.float16)
    check_products("cpu", dtypes, [(80, 48), (33, 130), (64, 128)], [1, 3, 64, 70])


def whole_numbers(*shape: int) -> Tensor:
    """Numbers whose products add up without rounding, in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(3)).half()


@interpreted
@pytest.mark.parametrize("depth", (72, 8200))
def test_interpreted_wide_products_are_those_of_other_tiles(depth: int) -> None:
    """Tiles at all edges, several of a program, with K in segments and without."""
    products = products_triton
    x, weight, bias = whole_numbers(131, depth), whole_numbers(260, depth), whole_numbers(260)
    segments = products.segments_of(x.dtype, 260, depth)
    size = products.segment_size(depth, segments)
    assert segments == (4 if depth == 8200 else 1)
    assert wide_triton.takes(x, weight.t())
    assert not wide_triton.takes(x[:, 1:], weight[:, 1:].t())
    for given in (None, bias):
        out = wide_triton.wide_product(x, weight.t(), given, segments, size, 3)
        exact = x.double() @ weight.double().t() + (0 if given is None else given.double())
        assert torch.equal(out.double(), exact.half().double())


@interpreted
def test_interpreted_swiglu_of_a_product_is_that_of_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products, gated = products_triton, gated_triton
    x, weight = whole_numbers(131, 72), whole_numbers(2 * 75, 72)
    assert gated.takes_gated(x, weight.t())
    assert not gated.takes_gated(x.float(), weight.float().t())
    assert not gated.takes_gated(x.new_empty(3, 4096), weight.new_empty(64, 4096).t())
    expected = swiglu(products.matmul_by_row(x, weight.t()))
    assert torch.equal(gated.gated_by_row(x, weight.t()), expected)
    assert torch.equal(gated.gated_by_row(x[None, 5:6], weight.t()), expected[None, 5:6])
    for takes_gate in (False, True):

        def is_wide(a: Tensor, b: Tensor, *, gated: bool = False, takes: bool = takes_gate) -> bool:
            return takes or not gated

        for module in (gated, products):
            monkeypatch.setattr(module, "is_wide", is_wide)
            monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
        assert torch.equal(gated.gated_by_row(x, weight.t()), expected)


def check_norm_of_segments(device: str, dtype: torch.dtype, rows: int, hidden: int) -> None:
    """A norm that adds up segments gives what one behind the product gives."""
    products = products_triton
    generator = torch.Generator().manual_seed(4)
    x, weight, residual, norm, bias = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((rows, 1, 8192), (hidden, 8192), (rows, 1, hidden), (hidden,), (hidden,))
    )
    parts = products.segments_by_row(x, weight.t())
    assert parts is not None and parts.shape == (4, rows, 1, hidden)
    for given in (None, bias):
        expected = add_norm(
            products.matmul_by_row(x, weight.t()), residual, norm, None, 1e-5, given
        )
        found = add_norm(parts, residual, norm, None, 1e-5, given, in_segments=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@interpreted
def test_interpreted_norm_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_triton
    tile = products.HALF_TILE_NARROW
    monkeypatch.setattr(products, "choose_tile", lambda *_: (tile, True))
    check_norm_of_segments("cpu", torch.float16, 3, 40)
    assert products.segments_by_row(torch.randn(3, 64).half(), torch.randn(64, 8).half()) is None
    monkeypatch.setattr(products, "choose_tile", lambda *_: (tile, False))
    x, weight = torch.randn(3, 8192).half(), torch.randn(8192, 8).half()
    assert products.segments_by_row(x, weight) is None


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
class TestOnGpu:
    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("rows", (1, 32, 128))
    def test_norm_of_segments(self, rows: int, dtype: torch.dtype, device: str) -> None:
        products_triton.find_tiles(torch.device("cuda", 0), dtype)
        check_norm_of_segments(device, dtype, rows, 4096)

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_wide_products_are_found_and_have_the_same_bits(
        self, dtype: torch.dtype, device: str
    ) -> None:
        products, gpu = products_triton, torch.device("cuda", 0)
        products.find_tiles(gpu, dtype)
        if torch.cuda.get_device_capability() == (9, 0):
            assert (gpu, dtype) in products._wide and (gpu, dtype) in products._wide_gated
        for rows, columns, depth in ((4099, 6144, 4096), (2048, 4096, 14336), (3000, 4104, 1000)):
            x = torch.randn(rows, depth, device=device).to(dtype)
            weight = torch.randn(columns, depth, device=device).to(dtype)
            bias = torch.randn(columns, device=device).to(dtype)
            out = products.matmul_by_row(x, weight.t(), bias)
            narrow = products.product(x, weight.t(), bias, products.HALF_TILE)
            assert torch.equal(out, narrow), (rows, columns, depth)

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("columns", (28672, 1234))
    def test_swiglu_in_a_product_has_the_bits_of_one_behind_it(
        self, columns: int, dtype: torch.dtype, device: str
    ) -> None:
        products, gpu = products_triton, torch.device("cuda", 0)
        products.find_tiles(gpu, dtype)
        x = torch.randn(2100, 4096 if columns > 8192 else 1000, device=device).to(dtype)
        weight = torch.randn(columns, x.shape[1], device=device).to(dtype) / 32
        chunk = swiglu(products.matmul_by_row(x, weight.t()))
        for rows in (1, 3, 32, 64, 65, 128, 300, 2100):
            out = gated_triton.gated_by_row(x[:rows], weight.t())
            assert torch.equal(out, chunk[:rows]), rows

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_all_tiles_have_the_same_bits(
        self, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        products, gpu = products_triton, torch.device("cuda", 0)
        monkeypatch.setattr(products, "_same", {})
        x = torch.randn(300, 1003, device=device).to(dtype)
        weight, bias = torch.randn(1000, 1003, device=device).to(dtype), None
        before = products.matmul_by_row(x, weight.t(), bias)
        products.find_tiles(gpu, dtype)
        assert products._same[gpu, dtype] == products.HALF_TILES
        for tile in products.HALF_TILES:
            monkeypatch.setattr(products, "choose_tile", lambda *_, tile=tile: (tile, False))
            assert torch.equal(products.matmul_by_row(x, weight.t(), bias), before), tile

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("depth", (2050, 4096, 14336))
    def test_segments(self, depth: int, dtype: torch.dtype, device: str) -> None:
        check_segments(device, dtype, depth, list(products_triton.HALF_TILES))

    @pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (28672, 4096)])
    def test_rows_of_a_step_have_the_bits_of_a_chunk(
        self, shape: tuple[int, int], device: str
    ) -> None:
        """With what is chosen for each number of rows, in a graph too."""
        products = products_triton
        products.find_tiles(torch.device("cuda", 0), torch.bfloat16)
        x = torch.randn(2048, shape[1], device=device).bfloat16()
        weight = torch.randn(shape, device=device).bfloat16()
        chunk = products.matmul_by_row(x, weight.t())
        for rows in (1, 3, 32, 64, 65, 128, 300, 512):
            products.matmul_by_row(x[:rows], weight.t())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = [products.matmul_by_row(x[k : k + rows], weight.t()) for k in (0, 700)]
            graph.replay()
            assert torch.equal(out[0], chunk[:rows]), rows
            assert torch.equal(out[1], chunk[700 : 700 + rows]), rows

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("counts", GROUPS)
    def test_groups(self, counts: list[int], dtype: torch.dtype, device: str) -> None:
        check_groups(device, dtype, counts)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_product_gives_a_row_its_own_bits(self, dtype: torch.dtype, device: str) -> None:
        shapes = [(4096, 1024), (97, 48), (1000, 1003), (2048, 4096)]
        counts = [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 257]
        check_products(device, (dtype,), shapes, counts)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("hidden", (48, 128, 768, 4096, 5000))
    def test_norms_and_activations_give_a_row_its_own_bits(
        self, dtype: torch.dtype, hidden: int, device: str
    ) -> None:
        x = torch.randn(257, hidden, device=device).to(dtype)
        weight, bias = torch.randn(2, hidden, device=device).to(dtype)
        functions: list[Callable[[Tensor], Tensor]] = [
            lambda x: F.rms_norm(x, (hidden,), weight, 1e-5),
            lambda x: F.layer_norm(x, (hidden,), weight, bias, 1e-5),
            lambda x: F.silu(x) * x,
            F.gelu,
            lambda x: F.gelu(x, approximate="tanh"),
        ]
        for number, function in enumerate(functions):
            expected = function(x)
            for rows in range(1, 257, 5):
                for first in (0, 257 - rows):
                    some = x[first : first + rows].clone()
                    assert torch.equal(function(some), expected[first : first + rows]), number

    @pytest.mark.parametrize("number", range(len(PRODUCTS)))
    def test_mode_routes_products(self, number: int, device: str) -> None:
        product = PRODUCTS[number]
        x, weight, bias = (
            torch.randn(s, device=device).bfloat16() for s in ((9, 64), (40, 64), (40,))
        )
        with torch.no_grad(), batch_invariant_mode():
            out = product(x, weight, bias)
            one = product(x[4:5], weight, bias)
        assert torch.equal(out[4:5], one)
        expected = products_triton.matmul_by_row(x, weight.t())
        if number < 2:
            expected = products_triton.matmul_by_row(x, weight.t(), bias)
        else:
            expected = expected + bias
        assert torch.equal(out, expected)

    def test_mode_refuses_what_mixes_rows(self, device: str) -> None:
        x = torch.randn(2, 8, 8, device=device)
        refused: list[Callable[[], Tensor]] = [
            lambda: torch.bmm(x, x),
            lambda: x @ x,
            lambda: torch.einsum("bij,bjk->bik", x, x),
            lambda: F.scaled_dot_product_attention(x, x, x),
            lambda: x[0].double() @ x[0].double(),
        ]
        with batch_invariant_mode():
            for operation in refused:
                with pytest.raises(ConfigError, match="batch"):
                    operation()
