"""The skinny GEMM of more than 64 rows (``skinny_gemm_many.cu``) against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    EPILOGUES,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    SQUARED_RELU,
    STORE,
    GemmProblem,
    TileConfig,
    padded,
)
from megatron_async.kernels.gemm.untuned.many import ranked
from megatron_async.kernels.shared_memory import block_limit
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both, relative_error
from tests.unit.kernels.test_skinny_gemm import Gemm

pytestmark = pytest.mark.sweep

__all__ = ["device"]

LAUNCHES = 10
"""Of a case in the emulator, each of which runs threads in another order."""


def many(
    row_tiles: int,
    split_k: int,
    stages: int,
    multicast: int,
    *,
    workspace: bool = False,
    persistent: bool = False,
) -> TileConfig:
    return TileConfig(
        row_tiles, 1, 1, split_k, stages, stream_x=True, persistent=persistent,
        workspace=workspace, tma=True, multicast=multicast,
    )  # fmt: skip


Shape = tuple[int, int, int, int, bool]
"""Rows and columns of the weight, norm, epilogue, and whether there is a bias."""
_SMALL: list[tuple[Shape, int, TileConfig]] = [
    # Each CTA by itself: all epilogues, and all rows from 65 on.
    ((96, 256, RMS_NORM, STORE, True), 65, many(2, 1, 3, 1)),
    ((96, 256, NO_NORM, STORE, False), 128, many(3, 1, 2, 1)),
    ((96, 192, NO_NORM, ADD, True), 70, many(2, 1, 2, 1)),
    ((96, 192, RMS_NORM, ADD, False), 127, many(6, 1, 2, 1)),
    ((96, 256, RMS_NORM, SILU_GATE, True), 100, many(3, 1, 4, 1)),
    ((64, 256, RMS_NORM, GELU_TANH, True), 65, many(4, 1, 2, 1)),
    ((64, 192, NO_NORM, GELU, False), 100, many(2, 1, 3, 1)),
    ((64, 192, RMS_NORM, SQUARED_RELU, False), 128, many(1, 1, 3, 1)),
    # CTAs that share x, of some of which no row of W is there; more stages than K has.
    ((64, 256, RMS_NORM, STORE, True), 128, many(1, 1, 2, 2)),
    ((64, 320, NO_NORM, STORE, True), 65, many(1, 1, 3, 4)),
    ((75, 256, RMS_NORM, STORE, True), 127, many(2, 1, 2, 2)),
    ((83, 192, RMS_NORM, STORE, False), 70, many(1, 1, 2, 4)),
    ((205, 64, RMS_NORM, GELU, True), 100, many(3, 1, 4, 2)),
    ((128, 320, RMS_NORM, SILU_GATE, False), 70, many(2, 1, 2, 4)),
    ((128, 448, NO_NORM, ADD, True), 128, many(2, 1, 4, 2)),
    ((128, 192, NO_NORM, ADD, False), 100, many(2, 1, 11, 4)),
    # CTAs of a cluster that share K, some of them x too: 1 to 4 stages each, not all as many.
    ((64, 448, NO_NORM, ADD, True), 100, many(2, 2, 2, 1)),
    ((96, 448, RMS_NORM, STORE, True), 65, many(3, 3, 2, 1)),
    ((32, 512, NO_NORM, ADD, False), 128, many(2, 8, 3, 1)),
    ((64, 576, RMS_NORM, SILU_GATE, True), 127, many(2, 4, 2, 1)),
    ((80, 320, RMS_NORM, STORE, True), 70, many(5, 5, 2, 1)),
    ((64, 448, NO_NORM, ADD, True), 127, many(2, 2, 2, 2)),
    ((64, 256, NO_NORM, ADD, False), 128, many(1, 2, 3, 4)),
    ((75, 448, RMS_NORM, STORE, True), 65, many(2, 3, 2, 2)),
    ((128, 704, RMS_NORM, SILU_GATE, False), 100, many(2, 4, 2, 2)),
    ((42, 256, RMS_NORM, SQUARED_RELU, True), 128, many(1, 4, 2, 2)),
    # By a workspace.
    ((64, 448, NO_NORM, ADD, True), 70, many(2, 2, 2, 1, workspace=True)),
    ((96, 576, RMS_NORM, STORE, False), 128, many(3, 4, 2, 1, workspace=True)),
    ((64, 640, NO_NORM, ADD, True), 100, many(1, 10, 2, 2, workspace=True)),
    ((75, 448, RMS_NORM, STORE, True), 127, many(2, 3, 2, 2, workspace=True)),
    ((64, 320, RMS_NORM, SILU_GATE, True), 65, many(1, 2, 3, 4, workspace=True)),
    ((160, 192, NO_NORM, ADD, False), 128, many(10, 3, 2, 1, workspace=True)),
    # CTAs that persist: four, whose last tiles are as many, or less.
    ((128, 256, RMS_NORM, STORE, True), 100, many(1, 1, 3, 1, persistent=True)),
    ((205, 192, RMS_NORM, STORE, True), 128, many(2, 1, 2, 1, persistent=True)),
    ((205, 256, RMS_NORM, STORE, False), 65, many(1, 1, 2, 2, persistent=True)),
    ((90, 64, NO_NORM, GELU_TANH, True), 127, many(1, 1, 3, 2, persistent=True)),
    ((203, 320, RMS_NORM, STORE, True), 70, many(1, 1, 4, 4, persistent=True)),
    ((128, 192, RMS_NORM, SILU_GATE, True), 128, many(1, 1, 5, 4, persistent=True)),
    ((192, 192, RMS_NORM, SILU_GATE, False), 100, many(2, 1, 2, 2, persistent=True)),
    # One warpgroup, which 48 rows have too, and two that have 128 rows each.
    ((64, 256, RMS_NORM, STORE, True), 33, many(2, 1, 2, 2)),
    ((64, 448, NO_NORM, ADD, True), 48, many(2, 2, 2, 1)),
    ((64, 320, NO_NORM, ADD, False), 40, many(2, 2, 2, 1, workspace=True)),
    ((128, 192, RMS_NORM, SILU_GATE, False), 41, many(1, 1, 3, 1)),
    ((64, 256, RMS_NORM, STORE, True), 64, many(2, 1, 2, 2)),
    ((64, 448, NO_NORM, ADD, True), 50, many(2, 2, 2, 2)),
    ((128, 192, RMS_NORM, SILU_GATE, False), 60, many(1, 1, 3, 8)),
    ((96, 320, NO_NORM, ADD, False), 64, many(3, 2, 2, 1, workspace=True)),
    ((90, 192, RMS_NORM, STORE, True), 64, many(1, 1, 2, 2, persistent=True)),
    ((64, 256, RMS_NORM, STORE, True), 256, many(2, 1, 2, 2)),
    ((64, 320, NO_NORM, ADD, True), 200, many(2, 2, 2, 1)),
    ((64, 320, NO_NORM, ADD, False), 129, many(1, 2, 2, 2, workspace=True)),
    ((64, 192, RMS_NORM, SILU_GATE, True), 255, many(2, 1, 2, 1)),
    ((75, 192, RMS_NORM, STORE, True), 256, many(1, 1, 2, 2, persistent=True)),
]
_SMALL += [
    # Every width of wgmma.
    ((32 * tiles, 192, RMS_NORM, STORE, bool(tiles % 2)), 61 + 4 * tiles, config)
    for tiles in range(1, 17)
    for config in (many(tiles, 1, 2, 1 + tiles % 2),)
]

_GPU_GEMMS: list[Shape] = [
    (28672, 4096, RMS_NORM, SILU_GATE, False),
    (4096, 14336, NO_NORM, ADD, False),
    (6144, 4096, RMS_NORM, STORE, True),
    (128256, 4096, RMS_NORM, STORE, False),
]


def _ranked(gemm: Gemm, count: int) -> list[TileConfig]:
    """The config that is chosen, and some that were not."""
    shape = (gemm.n, gemm.k, padded(gemm.rows), gemm.norm, gemm.epilogue)
    n, k, rows, norm, epilogue = shape
    sm_count, limit = cuda.sm_count(0), block_limit(gemm.device)
    chosen = choose(*shape, sm_count=sm_count, limit=limit)
    assert chosen is not None
    every = ranked(GemmProblem(rows, n, k, norm, epilogue), sm_count, limit)
    return [chosen, *every[1 :: max(1, len(every) // count)][:count]]


@on_both(
    *("gemm", "rows", "config"),
    gpu=((gemm, rows, None) for gemm in _GPU_GEMMS for rows in (65, 100, 128)),
    small=_SMALL,
)
class TestManyRows:
    @pytest.fixture(autouse=True)
    def setup(
        self,
        device: torch.device,
        gemm: Shape,
        rows: int,
        config: TileConfig | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if device.type == "cuda" and not cuda.has_wgmma(0):
            pytest.skip("it needs Hopper's TMA")
        if device.type == "cpu":  # so few that CTAs which persist have several tiles
            monkeypatch.setattr(cuda, "sm_count", lambda _: 2)
        self.gemm = Gemm(device, *gemm, rows)
        self.configs = _ranked(self.gemm, 12) if config is None else [config]
        self.statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM

    def test_each_launch_equals_float64_and_has_the_same_bits(self) -> None:
        wanted = self.gemm.wanted()
        for config in self.configs:
            kernel = self.gemm.kernel(config, self.statistics_norm)
            first, error = self.gemm.run(kernel, self.statistics_norm)
            assert relative_error(first, wanted) < LIMIT, config
            assert error < 1e-3, config
            for _ in range(LAUNCHES - 1):
                again, error = self.gemm.run(kernel, self.statistics_norm)
                assert torch.equal(first, again) and error < 1e-3, config


@emulated
def test_emulated_cases_use_every_way_to_build_the_kernel() -> None:
    for (n, k, norm, epilogue, _), rows, config in _SMALL:
        assert config.kernel == "skinny_gemm_many"
        assert config.fits(n, k, padded(rows), norm, epilogue), (n, k, rows, config)
    assert {epilogue for (_, _, _, epilogue, _), _, _ in _SMALL} == set(range(len(EPILOGUES)))
    ways = {
        (config.multicast, config.split_k > 1, config.workspace, config.persistent)
        for _, rows, config in _SMALL
        if padded(rows) == 128
    }
    splits = ((False, False, False), (True, False, False), (True, True, False))
    assert ways == {
        (multicast, *way)
        for multicast in (1, 2, 4)
        for way in (*splits, (False, False, True))
    }  # fmt: skip
    assert {config.row_tiles for _, _, config in _SMALL} == set(range(1, 17))
    assert {65, 70, 100, 127, 128} < {rows for _, rows, _ in _SMALL}
    assert {padded(rows) for _, rows, _ in _SMALL} == {48, 64, 128, 256}


@emulated
def test_ctas_that_persist_have_several_tiles_and_some_one_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch, sm_count=2)
    uneven = set()
    for shape, rows, config in _SMALL:
        if config.persistent:
            (ctas, _, _) = Gemm(torch.device("cpu"), *shape, rows).kernel(config)._grid
            assert ctas == 4 < config.ctas(shape[0])
            if config.ctas(shape[0]) % ctas:
                uneven.add(config.multicast)
    assert uneven == {1, 2}


# --- rows are by themselves ----------------------------------------------------------------------
_ALONE: list[tuple[Shape, TileConfig]] = [
    ((96, 256, RMS_NORM, STORE, True), many(2, 1, 3, 1)),
    ((64, 448, NO_NORM, ADD, True), many(2, 2, 2, 2)),
    ((64, 448, RMS_NORM, ADD, False), many(2, 3, 2, 2, workspace=True)),
    ((192, 192, RMS_NORM, SILU_GATE, False), many(2, 1, 2, 2, persistent=True)),
]


@on_both(
    *("gemm", "config"),
    gpu=((gemm, None) for gemm in _GPU_GEMMS),
    small=_ALONE,
)
def test_a_row_has_the_same_bits_among_any_others(
    device: torch.device, gemm: Shape, config: TileConfig | None
) -> None:
    """Whatever is in the other rows, and however many of them there are."""
    if device.type == "cuda" and not cuda.has_wgmma(0):
        pytest.skip("it needs Hopper's TMA")
    of_all, of_few = Gemm(device, *gemm, 128), Gemm(device, *gemm, 65)
    chosen = _ranked(of_all, 1)[0] if config is None else config
    kernel = of_all.kernel(chosen)
    whole, _ = of_all.run(kernel)
    of_few.x, of_few.residual = of_all.x[:65].clone(), of_all.residual[:65].clone()
    for name in ("weight", "bias", "norm_weight", "next_weight"):
        setattr(of_few, name, getattr(of_all, name))
    few, _ = of_few.run(kernel)
    assert torch.equal(few, whole[:65])
    of_all.x[1::2] = -3 * of_all.x[1::2].flip(0)
    of_all.residual[1::2] = 7
    others, _ = of_all.run(kernel)
    assert torch.equal(others[::2], whole[::2]) and not torch.equal(others[1::2], whole[1::2])


# --- the emulator notices ------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Fault:
    """What stands in the source, what does instead, of which kernel, and what is said."""

    there: str
    instead: str
    gemm: Shape
    config: TileConfig
    says: str | None = None


_STORE: Shape = (64, 512, RMS_NORM, STORE, True)
_ADD: Shape = (64, 512, NO_NORM, ADD, True)
_ALONE_CTA, _SHARING = many(2, 1, 2, 1), many(1, 1, 2, 2)
_CLUSTER, _BOTH = many(2, 2, 2, 1), many(2, 2, 2, 2)
_WORKSPACE = many(2, 2, 2, 2, workspace=True)
_PERSISTENT = many(1, 1, 2, 2, persistent=True)
_TILES: Shape = (203, 128, RMS_NORM, STORE, True)
_STATISTICS = "  if (NORM == 1) {\n    await_bytes(normed, 0);\n"
FAULTS = {
    "x is not awaited": Fault("  wait_for_predecessor();\n", "", _STORE, _ALONE_CTA),
    "a stage is not awaited": Fault(
        "        await_bytes(arrived + stage * 8, passed);\n", "", _STORE, _SHARING
    ),
    "a stage that one warpgroup has read is free": Fault(
        "freed + s * 8, MULTICAST * CONSUMERS", "freed + s * 8, MULTICAST", _STORE, _ALONE_CTA
    ),
    "a stage that one CTA has read is free": Fault(
        "freed + s * 8, MULTICAST * CONSUMERS", "freed + s * 8, CONSUMERS", _STORE, _SHARING
    ),
    "a stage is free before it was multiplied": Fault(
        "if (k_done) free_stage(i - 1, stage ? stage - 1 : ST - 1);",
        "free_stage(i, stage);",
        _STORE,
        _ALONE_CTA,
    ),
    "products are not awaited": Fault(
        "await_wgmma<TILES * 16, 1>(sums[b]);", ";", _STORE, _ALONE_CTA
    ),
    "the last products are not awaited": Fault(
        "await_wgmma<TILES * 16>(sums[b]);", ";", _STORE, _ALONE_CTA
    ),
    "a CTA tells itself alone what it has read": Fault(
        "peer_address(freed + which * 8, CLUSTER > 1 ? m * SPLIT_K + rank : m)",
        "freed + which * 8",
        _STORE,
        _SHARING,
    ),
    "a CTA keeps its part of x": Fault(
        "mask |= 1u << (CLUSTER > 1 ? m * SPLIT_K + rank : m);",
        "mask = 1u << member;",
        _STORE,
        _SHARING,
        "in vain",
    ),
    "x goes to CTAs that have other columns": Fault(
        "mask |= 1u << (CLUSTER > 1 ? m * SPLIT_K + rank : m);", "mask |= 1u << m;", _ADD, _BOTH
    ),
    "all load the first part of x": Fault(
        "row = member * (MT * 8 / MULTICAST);", "row = 0;", _STORE, _SHARING
    ),
    "all parts of x go to one place": Fault(
        "WEIGHT_BYTES + member * X_PART", "WEIGHT_BYTES", _STORE, _SHARING
    ),
    "peers are not awaited": Fault(
        "  if (MULTICAST * CLUSTER > 1) await_cluster();\n",
        "",
        _STORE,
        _SHARING,
        "may not have begun",
    ),
    "who loads forgets the rounds": Fault(
        "        go_on();\n        if (++stage == ST) stage = 0, passed ^= 1;",
        "        go_on();\n        if (++stage == ST) stage = 0;",
        _STORE,
        _ALONE_CTA,
    ),
    "who multiplies forgets the rounds": Fault(
        "ST - 1);\n        if (++stage == ST) stage = 0, passed ^= 1;",
        "ST - 1);\n        if (++stage == ST) stage = 0;",
        _STORE,
        _ALONE_CTA,
    ),
    "more stages than there are": Fault(
        "s < ST && s < total; s++) load_x(s % count, s)",
        "s < ST; s++) load_x(0, s)",
        (64, 128, RMS_NORM, STORE, True),
        many(2, 1, 3, 1),
    ),
    "another row's deviation": Fault(
        "const int row = first + j * ADDERS;",
        "const int row = first + (j ^ 1) * ADDERS;",
        _STORE,
        _ALONE_CTA,
    ),
    "two warps for three of the rows": Fault(
        "load_deviations(warp - 4 * CONSUMERS - 1)",
        "load_deviations(warp > 4 * CONSUMERS + 1)",
        _STORE,
        _ALONE_CTA,
    ),
    "deviations are not awaited": Fault(
        _STATISTICS, "  if (NORM == 1) {\n", _STORE, many(2, 1, 8, 1)
    ),
    "a tile's deviations are not awaited": Fault(
        "if (NORM == 1) await_bytes(normed, 0);", "", _TILES, _PERSISTENT
    ),
    "each lane says that all have deviations": Fault(
        "    __syncwarp();\n    if (lane == 0) arrive_at(normed);\n",
        "    arrive_at(normed);\n",
        (64, 64, RMS_NORM, STORE, True),
        many(2, 1, 2, 1),
    ),
    "peers may still read the ring": Fault(
        "  if (CLUSTER > 1) {\n    arrive_in_cluster();\n    await_cluster();\n  }\n",
        "",
        _ADD,
        _CLUSTER,
    ),
    "sums are not awaited": Fault(
        "    if (CLUSTER > 1) await_sent(base + ALL_SENT_AT, 0);\n", "", _ADD, _CLUSTER
    ),
    "sums go to the first CTAs of the cluster": Fault(
        "#define FIRST_PEER (CLUSTER > 1 ? member * SPLIT_K : 0)",
        "#define FIRST_PEER 0",
        _ADD,
        _BOTH,
    ),
    "sums of all CTAs in one place": Fault(
        "*part_of(rank, r, i) =", "*part_of(0, r, i) =", _ADD, _WORKSPACE
    ),
    "all but the last sums": Fault(
        "    if (before == SPLIT_K - 1) arrivals[tile] = 0;  // for the next launch\n  }\n"
        "  __syncthreads();\n#if SUMS",
        "  }\n  __syncthreads();\n#if SUMS",
        _ADD,
        _WORKSPACE,
    ),
    "some of the sums": Fault(
        "  if (before != SPLIT_K - 1) return;\n  // All", "  // All", _ADD, _WORKSPACE
    ),
    "a tile's weights are the next one's": Fault(
        "ahead_tile += tiles_at_once;", "ahead_tile++;", _TILES, _PERSISTENT
    ),
    "a tile is stored as the next one": Fault(
        "i < total; tile += tiles_at_once)", "i < total; tile++)", _TILES, _PERSISTENT
    ),
    "sums of the tile before": Fault("        clear();\n", "", _TILES, _PERSISTENT),
    "a tile that only one of two CTAs has": Fault(
        "(row_blocks + MULTICAST - 1) / MULTICAST * MULTICAST",
        "row_blocks",
        (80, 128, RMS_NORM, STORE, True),
        _PERSISTENT,
    ),
    "another warp's rows": Fault("warp % 4 * 2 + (i) % 2)", "warp % 4 + (i) % 2)", _ADD, _CLUSTER),
    "the first warpgroup's rows": Fault(
        "WEIGHT_BYTES + warp / 4 * BLOCKS * 8192", "WEIGHT_BYTES", _STORE, _ALONE_CTA
    ),
}


def _of_source(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel have this source."""
    emulator.install(monkeypatch, sm_count=2)
    monkeypatch.setattr(emulator, "source_text", lambda _: text)
    monkeypatch.setattr(
        skinny_gemm, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )


def _launches(gemm: Gemm, kernel: SkinnyGemm) -> None:
    wanted = gemm.wanted()
    for _ in range(LAUNCHES):
        out, error = gemm.run(kernel)
        assert relative_error(out, wanted) < LIMIT and error < 1e-3


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail, each for what it is there for."""
    there, instead, shape, config, says = dataclasses.astuple(FAULTS[fault])
    config = TileConfig(*config)
    text = emulator.source_text("skinny_gemm_many")
    assert text.count(there) == 1
    _of_source(text.replace(there, instead), monkeypatch)
    gemm = Gemm(torch.device("cpu"), *shape, 128)
    with pytest.raises(AssertionError, match=says):
        _launches(gemm, gemm.kernel(config))


@emulated
def test_two_stages_and_two_warpgroups_go_on_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In some orders only the warp that brings stages in does anything for a while."""
    emulator.install(monkeypatch)
    torch.manual_seed(0)
    x, weight = torch.randn(96, 512).bfloat16(), torch.randn(80, 512).bfloat16()
    gemm = SkinnyGemm(80, 512, 128, NO_NORM, STORE, RMS_NORM, many(1, 1, 2, 1), torch.device("cpu"))
    for _ in range(24):
        out = torch.full((96, 80), float("nan")).bfloat16()
        gemm(x, weight, out)
        assert relative_error(out, x.double() @ weight.double().T) < LIMIT
