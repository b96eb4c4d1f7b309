"""The products of the fused decode forward against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import skinny_gemm as cuda_linear
from megatron_async.kernels.gemm import tilings
from megatron_async.kernels.gemm.measured_tilings import MEASURED, choose
from megatron_async.kernels.gemm.skinny_gemm import Linear, statistics_of
from megatron_async.kernels.gemm.tilings import (
    ADD,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    Tiling,
    padded,
)
from tests.support import emulator
from tests.support.cuda_kernels import (
    LIMIT,
    device,
    emulated,
    on_both,
    on_gpu,
    relative_error,
)
from tests.support.known_products import NORMS, PRODUCTS

__all__ = ["device"]

# --- products ------------------------------------------------------------------------------------


class Product:
    def __init__(
        self,
        device: torch.device,
        n: int,
        k: int,
        norm: int,
        epilogue: int,
        bias: bool,
        rows: int,
    ) -> None:
        self.device = device
        self.n, self.k, self.norm, self.epilogue, self.rows = n, k, norm, epilogue, rows
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

        self.x = draw(rows, k) + 0.25
        self.weight = draw(n, k, scale=0.05)
        self.bias = draw(n) if bias else None
        self.norm_weight = draw(k) + 1
        self.norm_bias = draw(k) if norm == LAYER_NORM else None
        self.residual = draw(rows, n)
        self.next_weight = draw(n) + 1

    def wanted(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm == RMS_NORM:
            x = F.rms_norm(x, (self.k,), self.norm_weight.double(), 1e-5)
        elif self.norm == LAYER_NORM:
            assert self.norm_bias is not None
            x = F.layer_norm(x, (self.k,), self.norm_weight.double(), self.norm_bias.double(), 1e-5)
        # Part by part: the widest weight takes 5 GB in float64.
        y = torch.cat([x @ part.double().T for part in self.weight.split(16384)], 1)
        if self.bias is not None:
            y = y + self.bias.double()
        if self.epilogue == ADD:
            return y + self.residual.double()
        if self.epilogue == SILU_GATE:
            gate, up = y.chunk(2, 1)
            return F.silu(gate) * up
        if self.epilogue in (GELU, GELU_TANH):
            return F.gelu(y, approximate="tanh" if self.epilogue == GELU_TANH else "none")
        return y

    def linear(self, tiling: Tiling, statistics_norm: int = RMS_NORM) -> Linear:
        return Linear(
            self.n, self.k, padded(self.rows), self.norm, self.epilogue, statistics_norm, tiling,
            self.device,
        )  # fmt: skip

    def run(self, linear: Linear, statistics_norm: int = RMS_NORM) -> tuple[torch.Tensor, float]:
        """The result, and the error of the statistics that came with it."""
        width = self.n // 2 if self.epilogue == SILU_GATE else self.n
        # A row more than the kernel may write: it must stay as it is.
        guarded = torch.full((self.rows + 1, width), float("nan"), device=self.device).bfloat16()
        out = guarded[: self.rows]
        statistics = statistics_of(self.x, self.norm, 32 if self.k % 64 else 64)
        x = self.x * self.norm_weight if self.norm == RMS_NORM else self.x
        emitted, scaled, error = None, None, 0.0
        if self.epilogue == ADD:
            tiles = self.n // linear.statistic_rows
            emitted = torch.full((self.rows, tiles, 2), float("nan"), device=self.device)
            out.copy_(self.residual)
            if statistics_norm == RMS_NORM:
                scaled = torch.full_like(out, float("nan"))
        linear(
            x, self.weight, out, bias=self.bias,
            norm=(self.norm_weight, self.norm_bias, 1e-5) if self.norm else None,
            statistics=statistics if self.norm else None,
            residual=out if self.epilogue == ADD else None, statistics_out=emitted,
            scaled=None if scaled is None else (self.next_weight, scaled),
        )  # fmt: skip
        assert guarded[-1].isnan().all()
        assert scaled is None or torch.equal(scaled, out * self.next_weight)
        if emitted is not None:
            wanted = statistics_of(out, statistics_norm, linear.statistic_rows)
            error = relative_error(emitted, wanted.double())
        return out, error


def _tilings(product: Product, count: int) -> list[Tiling]:
    """A spread of what can be built."""
    every = [
        Tiling(row_tiles, warps_n, warps_k, splits, stages, stream, persistent, memory)
        for row_tiles in (1, 2, 3)
        for warps_n in (1, 2, 4)
        for warps_k in (1, 2, 4)
        for splits in (1, 2, 4)
        for stages in (2, 4, 5)
        for stream in (False, True)
        for persistent in (False, True)
        for memory in (False, True)
    ]
    shape = (product.n, product.k, padded(product.rows), product.norm, product.epilogue)
    boxes = [
        Tiling(row_tiles, 1, 1, splits, stages, True, persistent, memory, box=True)
        for row_tiles in (1, 3, 4, 6, 14)
        for splits in (1, 2, 4)
        for stages in (1, 3, 5)
        for persistent in (False, True)
        for memory in (False, True)
    ]
    chosen: list[Tiling] = []
    for some in (every, boxes if cuda.has_wgmma(0) else []):
        fitting = [tiling for tiling in some if tiling.fits(*shape)]
        chosen += fitting[:: max(1, len(fitting) // count)][:count]
    return chosen


_PRODUCTS = [
    (512, 256, RMS_NORM, STORE, True),
    (256, 512, NO_NORM, ADD, False),
    (256, 512, NO_NORM, ADD, True),
    (1024, 256, RMS_NORM, SILU_GATE, False),
    (768, 192, LAYER_NORM, GELU_TANH, True),
    (768, 192, LAYER_NORM, GELU, True),
    (1003, 256, RMS_NORM, STORE, False),
    (1003, 192, LAYER_NORM, STORE, False),
    (2304, 768, LAYER_NORM, STORE, True),
]
_SMALL_PRODUCTS = [
    ((96, 192, RMS_NORM, STORE, True), 5, Tiling(3, 1, 3, 1, 2)),
    ((96, 256, RMS_NORM, STORE, True), 32, Tiling(1, 2, 1, 2, 3, stream=True)),
    ((96, 448, RMS_NORM, STORE, False), 13, Tiling(1, 3, 1, 2, 3, stream=True, memory=True)),
    ((128, 256, RMS_NORM, SILU_GATE, False), 1, Tiling(2, 2, 1, 1, 4)),
    ((128, 320, RMS_NORM, SILU_GATE, True), 32, Tiling(2, 2, 1, 1, 4, stream=True)),
    ((128, 384, RMS_NORM, SILU_GATE, False), 17, Tiling(1, 4, 1, 2, 2, memory=True)),
    ((205, 256, RMS_NORM, STORE, False), 30, Tiling(1, 2, 1, 1, 3, stream=True, persistent=True)),
    ((75, 256, RMS_NORM, STORE, False), 2, Tiling(1, 2, 1, 1, 8, persistent=True)),
    ((64, 512, NO_NORM, ADD, False), 32, Tiling(1, 2, 1, 4, 3, stream=True, memory=True)),
    ((64, 512, NO_NORM, ADD, True), 16, Tiling(1, 2, 1, 4, 2)),
    ((64, 448, NO_NORM, ADD, True), 8, Tiling(1, 1, 4, 1, 3)),
    ((64, 448, NO_NORM, ADD, False), 3, Tiling(2, 2, 2, 2, 4)),
    ((96, 512, NO_NORM, ADD, False), 6, Tiling(3, 1, 2, 2, 2)),
    ((192, 512, NO_NORM, ADD, True), 16, Tiling(3, 2, 1, 4, 2)),
    ((160, 448, RMS_NORM, STORE, True), 7, Tiling(1, 5, 1, 3, 2)),
    ((128, 512, NO_NORM, ADD, True), 8, Tiling(1, 4, 1, 3, 2)),
    ((208, 256, RMS_NORM, STORE, False), 13, Tiling(3, 1, 1, 1, 4, True, box=True)),
    ((176, 320, RMS_NORM, SILU_GATE, True), 32, Tiling(11, 1, 1, 1, 2, True, box=True)),
    ((96, 320, RMS_NORM, SILU_GATE, False), 1, Tiling(2, 1, 1, 1, 3, True, box=True)),
    ((205, 384, RMS_NORM, STORE, True), 17, Tiling(2, 1, 1, 2, 3, True, box=True)),
    ((205, 256, NO_NORM, STORE, False), 6, Tiling(4, 1, 1, 1, 5, True, True, box=True)),
    ((192, 448, NO_NORM, ADD, True), 30, Tiling(6, 1, 1, 4, 1, True, False, True, box=True)),
    ((160, 512, NO_NORM, ADD, False), 20, Tiling(5, 1, 1, 2, 3, True, box=True)),
    ((192, 512, NO_NORM, ADD, True), 32, Tiling(6, 1, 1, 4, 3, True, box=True)),
    ((208, 256, RMS_NORM, STORE, False), 50, Tiling(3, 1, 1, 1, 3, True, box=True)),
    ((160, 320, RMS_NORM, SILU_GATE, True), 64, Tiling(5, 1, 1, 1, 2, True, box=True)),
    ((205, 256, NO_NORM, STORE, False), 33, Tiling(4, 1, 1, 1, 3, True, True, box=True)),
    ((192, 448, NO_NORM, ADD, True), 40, Tiling(6, 1, 1, 4, 1, True, False, True, box=True)),
    ((192, 256, NO_NORM, ADD, False), 48, Tiling(4, 1, 1, 2, 4, True, box=True)),
    ((160, 512, NO_NORM, ADD, False), 64, Tiling(5, 1, 1, 2, 4, True, box=True)),
    ((96, 192, LAYER_NORM, GELU_TANH, True), 7, Tiling(1, 3, 2, 1, 3)),
    ((64, 256, LAYER_NORM, GELU, True), 20, Tiling(1, 2, 2, 2, 2)),
]


@on_both(
    *("product", "rows", "tiling"),
    gpu=(
        (product, rows, None)
        for product in _PRODUCTS
        for rows in (1, 5, 8, 13, 16, 32, 40, 48, 50, 64)
        if rows <= tilings.ANY_SHAPE_ROWS or product[2] != LAYER_NORM
    ),
    small=_SMALL_PRODUCTS,
)
class TestProducts:
    @pytest.fixture(autouse=True)
    def setup(
        self,
        device: torch.device,
        product: tuple[int, int, int, int, bool],
        rows: int,
        tiling: Tiling | None,
    ) -> None:
        if device.type == "cuda" and rows > tilings.ANY_SHAPE_ROWS and not cuda.has_wgmma(0):
            pytest.skip("more rows than 32 need Hopper's boxes")
        self.product = Product(device, *product, rows)
        self.tilings = _tilings(self.product, 5) if tiling is None else [tiling]
        assert self.tilings

    def test_equals_float64(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        wanted = self.product.wanted()
        for tiling in self.tilings:
            linear = self.product.linear(tiling, statistics_norm)
            out, error = self.product.run(linear, statistics_norm)
            assert relative_error(out, wanted) < LIMIT, tiling
            assert error < 1e-3, tiling

    def test_a_repetition_has_the_same_bits(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        linear = self.product.linear(self.tilings[-1], statistics_norm)
        first, _ = self.product.run(linear, statistics_norm)
        again, _ = self.product.run(linear, statistics_norm)
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        pytest.param(n, k, rows, marks=on_gpu)
        for rows in (1, 2, 3, 7, 8, 13, 20, 32, 33, 48, 50, 64)
        for n, k in MEASURED[32 if rows <= 32 else 64]
    ],
)
def test_measured_tilings_equal_float64(n: int, k: int, rows: int) -> None:
    product = Product(torch.device("cuda"), *PRODUCTS[n, k], rows)
    boxes = cuda.has_wgmma(0)
    tiling = choose(n, k, padded(rows), product.norm, product.epilogue, boxes)
    if tiling is None:
        assert not boxes
        pytest.skip("more rows than 32 need Hopper's boxes")
    statistics_norm = NORMS[min(n, k)]
    out, error = product.run(product.linear(tiling, statistics_norm), statistics_norm)
    assert relative_error(out, product.wanted()) < LIMIT, tiling
    assert error < 1e-3, tiling


@emulated
def test_emulated_tilings_use_every_way_to_build_the_kernel() -> None:
    tilings = [tiling for _, _, tiling in _SMALL_PRODUCTS]
    for (n, k, norm, epilogue, _), rows, tiling in _SMALL_PRODUCTS:
        assert tiling.fits(n, k, padded(rows), norm, epilogue), tiling
    for name in ("stream", "persistent", "memory", "box"):
        assert {getattr(tiling, name) for tiling in tilings} == {False, True}
    assert {epilogue for (_, _, _, epilogue, _), _, _ in _SMALL_PRODUCTS} == set(range(5))


# --- the emulator notices -------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize(
    ("there", "instead", "says"),
    [
        ("  wait_for_predecessor();\n", "", None),
        ("      __syncthreads();\n      issue_x();", "      issue_x();", None),
        ("await_copies<ST - 1>();", "", None),
        ("    await_bytes(arrived + stage * 8, passed);\n", "", "announced twice"),
        ("    for (int s = 0; s < ST && s < total", "    for (int s = 0; s < 0", "in vain"),
        ("s < ST && s < total; s++) issue_x(s % count", "s < ST; s++) issue_x(0", None),
        ("await_wgmma<MT * 8>(sums[r]);", ";", None),
        ("    if (!BOX) keep_residual();\n#endif", "#endif", None),
        ("      __syncwarp();  // what the other lanes copied\n", "", None),
        ("      await_cluster();\n", ";", "may not have begun"),
        ("    if (CLUSTER > 1) await_sent(base + ALL_SENT_AT, 0);\n", "", None),
        ("base + SENT_AT + part_at(f % OWN, rank, wk)", "base + SENT_AT + part_at(0, 0, 0)", None),
        (
            "lane % 8 * 16;\n        }\n  };\n  start_tile",
            "size_t(N) * K * 2;}};start_tile",
            "of nobody",
        ),
    ],
)
def test_the_emulator_notices(
    there: str, instead: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tests above can fail, each for what it is there for."""
    text = emulator.source_text("linear")
    assert there in text
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        cuda_linear, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )
    adds = "residual" in there
    shape = (64, 512, NO_NORM if adds else RMS_NORM, ADD if adds else STORE, not adds)
    product = Product(torch.device("cpu"), *shape, 32)
    monkeypatch.setattr(cuda, "tensor_map", emulator.tensor_map)
    tiling = Tiling(1, 2, 1, 2, 3, stream=True, memory=True)
    if any(name in there for name in ("arrived", "total", "wgmma")):
        tiling = tiling._replace(row_tiles=4, warps_n=1, box=True)
    if any(name in there for name in ("cluster", "SENT")):
        tiling = tiling._replace(memory=False)
    linear = product.linear(tiling)
    with pytest.raises(AssertionError, match=says):
        out, _ = product.run(linear)
        assert relative_error(out, product.wanted()) < LIMIT
