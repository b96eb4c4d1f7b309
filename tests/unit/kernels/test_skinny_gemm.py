"""The skinny GEMMs of the fused decode forward against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm, scaled_product, statistics_of
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    EPILOGUES,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    SQUARED_RELU,
    STORE,
    TileConfig,
    measured,
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
from tests.support.known_gemms import GEMMS, NORMS

pytestmark = pytest.mark.sweep

__all__ = ["device"]


class Gemm:
    def __init__(
        self,
        device: torch.device,
        n: int,
        k: int,
        norm: int,
        epilogue: int,
        bias: bool,
        rows: int,
        scale_columns: int = 0,
    ) -> None:
        self.device, self.scale_columns = device, scale_columns
        self.n, self.k, self.norm, self.epilogue, self.rows = n, k, norm, epilogue, rows
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

        self.x = draw(rows, k) + 0.25
        self.weight = draw(n, k, scale=0.05)
        self.weight_scale: torch.Tensor | None = None
        if scale_columns:
            shape = n, k // scale_columns
            self.weight = (self.weight * 400).to(torch.float8_e4m3fn)
            self.weight_scale = torch.rand(shape, generator=generator, device=device) / 100
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
        if self.weight_scale is not None:
            y = scaled_product(x, self.weight, self.weight_scale)
        else:  # part by part: the widest weight takes 5 GB in float64
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
        if self.epilogue == SQUARED_RELU:
            return F.relu(y).square()
        return y

    def kernel(self, config: TileConfig, statistics_norm: int = RMS_NORM) -> SkinnyGemm:
        return SkinnyGemm(
            self.n, self.k, padded(self.rows), self.norm, self.epilogue, statistics_norm, config,
            self.device, scale_columns=self.scale_columns,
        )  # fmt: skip

    def run(
        self, kernel: SkinnyGemm, statistics_norm: int = RMS_NORM
    ) -> tuple[torch.Tensor, float]:
        """The result, and the error of the statistics that came with it."""
        width = self.n // 2 if self.epilogue == SILU_GATE else self.n
        # A row more than the kernel may write: it must stay as it is.
        guarded = torch.full((self.rows + 1, width), float("nan"), device=self.device).bfloat16()
        out = guarded[: self.rows]
        statistics = statistics_of(self.x, self.norm, 32 if self.k % 64 else 64)
        x = self.x * self.norm_weight if self.norm == RMS_NORM else self.x
        emitted, scaled, error = None, None, 0.0
        if self.epilogue == ADD:
            tiles = self.n // kernel.statistic_rows
            emitted = torch.full((self.rows, tiles, 2), float("nan"), device=self.device)
            out.copy_(self.residual)
            if statistics_norm == RMS_NORM:
                scaled = torch.full_like(out, float("nan"))
        kernel(
            x, self.weight, out, bias=self.bias,
            norm=(self.norm_weight, self.norm_bias, 1e-5) if self.norm else None,
            statistics=statistics if self.norm else None,
            residual=out if self.epilogue == ADD else None, statistics_out=emitted,
            scaled=None if scaled is None else (self.next_weight, scaled),
            weight_scale=self.weight_scale,
        )  # fmt: skip
        assert guarded[-1].isnan().all()
        assert scaled is None or torch.equal(scaled, out * self.next_weight)
        if emitted is not None:
            wanted = statistics_of(out, statistics_norm, kernel.statistic_rows)
            error = relative_error(emitted, wanted.double())
        return out, error


def _configs(gemm: Gemm, count: int) -> list[TileConfig]:
    """A spread of what can be built."""
    every = [
        TileConfig(row_tiles, warps_n, warps_k, split_k, stages, stream_x, persistent, workspace)
        for row_tiles in (1, 2, 3)
        for warps_n in (1, 2, 4)
        for warps_k in (1, 2, 4)
        for split_k in (1, 2, 4)
        for stages in (2, 4, 5)
        for stream_x in (False, True)
        for persistent in (False, True)
        for workspace in (False, True)
    ]
    shape = (gemm.n, gemm.k, padded(gemm.rows), gemm.norm, gemm.epilogue)
    with_tma = [
        TileConfig(row_tiles, 1, 1, split_k, stages, True, persistent, workspace, tma=True)
        for row_tiles in (1, 3, 4, 6, 14)
        for split_k in (1, 2, 4)
        for stages in (1, 3, 5)
        for persistent in (False, True)
        for workspace in (False, True)
    ]
    chosen: list[TileConfig] = []
    for some in (every, with_tma if cuda.has_wgmma(0) else []):
        fitting = [config for config in some if config.fits(*shape)]
        chosen += fitting[:: max(1, len(fitting) // count)][:count]
    return chosen


_GEMMS = [
    (512, 256, RMS_NORM, STORE, True),
    (256, 512, NO_NORM, ADD, False),
    (256, 512, NO_NORM, ADD, True),
    (1024, 256, RMS_NORM, SILU_GATE, False),
    (768, 192, LAYER_NORM, GELU_TANH, True),
    (768, 192, LAYER_NORM, GELU, True),
    (768, 256, RMS_NORM, SQUARED_RELU, False),
    (1003, 256, RMS_NORM, STORE, False),
    (1003, 192, LAYER_NORM, STORE, False),
    (2304, 768, LAYER_NORM, STORE, True),
]
_SMALL_GEMMS = [
    ((96, 192, RMS_NORM, STORE, True), 5, TileConfig(3, 1, 3, 1, 2)),
    ((96, 256, RMS_NORM, STORE, True), 32, TileConfig(1, 2, 1, 2, 3, stream_x=True)),
    (
        (96, 448, RMS_NORM, STORE, False),
        13,
        TileConfig(1, 3, 1, 2, 3, stream_x=True, workspace=True),
    ),
    ((128, 256, RMS_NORM, SILU_GATE, False), 1, TileConfig(2, 2, 1, 1, 4)),
    ((128, 320, RMS_NORM, SILU_GATE, True), 32, TileConfig(2, 2, 1, 1, 4, stream_x=True)),
    ((128, 384, RMS_NORM, SILU_GATE, False), 17, TileConfig(1, 4, 1, 2, 2, workspace=True)),
    (
        (205, 256, RMS_NORM, STORE, False),
        30,
        TileConfig(1, 2, 1, 1, 3, stream_x=True, persistent=True),
    ),
    ((75, 256, RMS_NORM, STORE, False), 2, TileConfig(1, 2, 1, 1, 8, persistent=True)),
    ((64, 512, NO_NORM, ADD, False), 32, TileConfig(1, 2, 1, 4, 3, stream_x=True, workspace=True)),
    ((64, 512, NO_NORM, ADD, True), 16, TileConfig(1, 2, 1, 4, 2)),
    ((64, 448, NO_NORM, ADD, True), 8, TileConfig(1, 1, 4, 1, 3)),
    ((64, 448, NO_NORM, ADD, False), 3, TileConfig(2, 2, 2, 2, 4)),
    ((96, 512, NO_NORM, ADD, False), 6, TileConfig(3, 1, 2, 2, 2)),
    ((192, 512, NO_NORM, ADD, True), 16, TileConfig(3, 2, 1, 4, 2)),
    ((160, 448, RMS_NORM, STORE, True), 7, TileConfig(1, 5, 1, 3, 2)),
    ((128, 512, NO_NORM, ADD, True), 8, TileConfig(1, 4, 1, 3, 2)),
    ((208, 256, RMS_NORM, STORE, False), 13, TileConfig(3, 1, 1, 1, 4, True, tma=True)),
    ((176, 320, RMS_NORM, SILU_GATE, True), 32, TileConfig(11, 1, 1, 1, 2, True, tma=True)),
    ((96, 320, RMS_NORM, SILU_GATE, False), 1, TileConfig(2, 1, 1, 1, 3, True, tma=True)),
    ((205, 384, RMS_NORM, STORE, True), 17, TileConfig(2, 1, 1, 2, 3, True, tma=True)),
    ((205, 256, NO_NORM, STORE, False), 6, TileConfig(4, 1, 1, 1, 5, True, True, tma=True)),
    ((192, 448, NO_NORM, ADD, True), 30, TileConfig(6, 1, 1, 4, 1, True, False, True, tma=True)),
    ((160, 512, NO_NORM, ADD, False), 20, TileConfig(5, 1, 1, 2, 3, True, tma=True)),
    ((192, 512, NO_NORM, ADD, True), 32, TileConfig(6, 1, 1, 4, 3, True, tma=True)),
    ((208, 256, RMS_NORM, STORE, False), 50, TileConfig(3, 1, 1, 1, 3, True, tma=True)),
    ((160, 320, RMS_NORM, SILU_GATE, True), 64, TileConfig(5, 1, 1, 1, 2, True, tma=True)),
    ((205, 256, NO_NORM, STORE, False), 33, TileConfig(4, 1, 1, 1, 3, True, True, tma=True)),
    ((192, 448, NO_NORM, ADD, True), 40, TileConfig(6, 1, 1, 4, 1, True, False, True, tma=True)),
    ((192, 256, NO_NORM, ADD, False), 48, TileConfig(4, 1, 1, 2, 4, True, tma=True)),
    ((160, 512, NO_NORM, ADD, False), 64, TileConfig(5, 1, 1, 2, 4, True, tma=True)),
    ((96, 192, LAYER_NORM, GELU_TANH, True), 7, TileConfig(1, 3, 2, 1, 3)),
    ((64, 256, LAYER_NORM, GELU, True), 20, TileConfig(1, 2, 2, 2, 2)),
    ((64, 256, RMS_NORM, SQUARED_RELU, False), 5, TileConfig(1, 2, 2, 1, 2)),
]


@on_both(
    *("gemm", "rows", "config"),
    gpu=(
        (gemm, rows, None)
        for gemm in _GEMMS
        for rows in (1, 5, 8, 13, 16, 32, 40, 48, 50, 64)
        if rows <= ANY_SHAPE_ROWS or gemm[2] != LAYER_NORM
    ),
    small=_SMALL_GEMMS,
)
class TestGemms:
    @pytest.fixture(autouse=True)
    def setup(
        self,
        device: torch.device,
        gemm: tuple[int, int, int, int, bool],
        rows: int,
        config: TileConfig | None,
    ) -> None:
        if device.type == "cuda" and rows > ANY_SHAPE_ROWS and not cuda.has_wgmma(0):
            pytest.skip("more rows than 32 need Hopper's TMA")
        self.gemm = Gemm(device, *gemm, rows)
        self.configs = _configs(self.gemm, 5) if config is None else [config]
        assert self.configs

    def test_equals_float64(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        wanted = self.gemm.wanted()
        for config in self.configs:
            kernel = self.gemm.kernel(config, statistics_norm)
            out, error = self.gemm.run(kernel, statistics_norm)
            assert relative_error(out, wanted) < LIMIT, config
            assert error < 1e-3, config

    def test_a_repetition_has_the_same_bits(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        kernel = self.gemm.kernel(self.configs[-1], statistics_norm)
        first, _ = self.gemm.run(kernel, statistics_norm)
        again, _ = self.gemm.run(kernel, statistics_norm)
        assert torch.equal(first, again)


def _measured_shapes(rows: int) -> list[tuple[int, int]]:
    return [(problem.n, problem.k) for problem in measured() if problem.rows == rows]


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        pytest.param(n, k, rows, marks=on_gpu)
        for rows in (1, 2, 3, 7, 8, 13, 20, 32, 33, 48, 50, 64)
        for n, k in _measured_shapes(32 if rows <= 32 else 64)
    ],
)
def test_measured_configs_equal_float64(n: int, k: int, rows: int) -> None:
    gemm = Gemm(torch.device("cuda"), *GEMMS[n, k], rows)
    tma = cuda.has_wgmma(0)
    config = choose(n, k, padded(rows), gemm.norm, gemm.epilogue, tma, sm_count=cuda.sm_count(0))
    if config is None:
        assert not tma
        pytest.skip("more rows than 32 need Hopper's TMA")
    statistics_norm = NORMS[min(n, k)]
    out, error = gemm.run(gemm.kernel(config, statistics_norm), statistics_norm)
    assert relative_error(out, gemm.wanted()) < LIMIT, config
    assert error < 1e-3, config


@emulated
def test_emulated_configs_use_every_way_to_build_the_kernels() -> None:
    configs = [config for _, _, config in _SMALL_GEMMS]
    for (n, k, norm, epilogue, _), rows, config in _SMALL_GEMMS:
        assert config.fits(n, k, padded(rows), norm, epilogue), config
    for name in ("stream_x", "persistent", "workspace", "tma"):
        assert {getattr(config, name) for config in configs} == {False, True}
    assert {epilogue for (_, _, _, epilogue, _), _, _ in _SMALL_GEMMS} == set(range(len(EPILOGUES)))


# --- the emulator notices -------------------------------------------------------------------------
@emulated
@pytest.mark.parametrize(
    ("kernel", "there", "instead", "says"),
    [
        ("mma", "  wait_for_predecessor();\n", "", None),
        ("mma", "      __syncthreads();\n      load_x();", "      load_x();", None),
        ("mma", "await_copies<ST - 1>();", "", None),
        ("wgmma", "  wait_for_predecessor();\n", "", None),
        ("wgmma", "    await_bytes(arrived + stage * 8, passed);\n", "", "announced twice"),
        (
            "wgmma",
            "    for (int s = 0; s < ST && s < total",
            "    for (int s = 0; s < 0",
            "in vain",
        ),
        ("wgmma", "s < ST && s < total; s++) load_x(s % count", "s < ST; s++) load_x(0", None),
        ("wgmma", "await_wgmma<MT * 8>(sums[r]);", ";", None),
        ("mma add", "    if (LATE_RESIDUAL) load_residual();\n", "", None),
        ("wgmma add", "  load_residual();\n", "", None),
        ("mma", "      __syncwarp();  // RAW: what the other lanes copied\n", "", None),
        ("mma cluster", "      await_cluster();\n", ";", "may not have begun"),
        ("mma cluster", "    if (CLUSTER > 1) await_sent(base + ALL_SENT_AT, 0);\n", "", None),
        (
            "mma cluster",
            "base + SENT_AT + part_at(f % OWN, rank, wk)",
            "base + SENT_AT + part_at(0, 0, 0)",
            None,
        ),
        (
            "mma",
            "first_stage * 128 + lane % 8 * 16;",
            "first_stage * 128 + size_t(N) * K * 2;",
            "of nobody",
        ),
    ],
)
def test_the_emulator_notices(
    kernel: str, there: str, instead: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tests above can fail, each for what it is there for."""
    config = TileConfig(1, 2, 1, 2, 3, stream_x=True, workspace="cluster" not in kernel)
    if "wgmma" in kernel:
        config = config._replace(row_tiles=4, warps_n=1, tma=True)
    text = emulator.source_text(config.kernel)
    assert there in text
    emulator.install(monkeypatch)
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        skinny_gemm, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )
    adds = "add" in kernel
    shape = (64, 512, NO_NORM if adds else RMS_NORM, ADD if adds else STORE, not adds)
    gemm = Gemm(torch.device("cpu"), *shape, 32)
    with pytest.raises(AssertionError, match=says):
        out, _ = gemm.run(gemm.kernel(config))
        assert relative_error(out, gemm.wanted()) < LIMIT
