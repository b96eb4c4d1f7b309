"""Skinny GEMMs that multiply e4m3 by e4m3, against float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.skinny_gemm import Sending, SkinnyGemm
from megatron_async.kernels.gemm.tile_choice import choose, find
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    E4M3_STAGE_K,
    FEW_ROWS,
    GELU_TANH,
    HEURISTIC,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    SQUARED_RELU,
    STORE,
    Entry,
    GemmProblem,
    TileConfig,
    padded,
)
from megatron_async.kernels.gemm.untuned.search import deepest, short_list, spread
from megatron_async.models.quantized.inputs import quantize_inputs
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.known_gemms import GEMMS
from tests.unit.kernels.test_e4m3_gemm import Codes
from tests.unit.kernels.test_skinny_gemm import Gemm

__all__ = ["device"]

LIMIT = 4e-3
"""Of the relative error: the output is rounded to bfloat16, and on a GPU the sums of 128 columns to
some 14 bits."""
SMS = 132
E4M3 = torch.float8_e4m3fn


def _wgmma(tiles: int, split_k: int = 1, stages: int = 2, **values: bool) -> TileConfig:
    return TileConfig(tiles, 1, 1, split_k, stages, stream_x=True, tma=True, **values)


_PLACES = [(32, _wgmma(5)), (48, _wgmma(12, 2))]
_MORE_PLACES = [
    (64, _wgmma(3, persistent=True)), (8, _wgmma(2, 2, workspace=True)), (64, _wgmma(16)),
    (16, _wgmma(4, stages=3)),
]  # fmt: skip


def _one_by_one(codes: Codes, config: TileConfig, rows: int, *, of_x: bool) -> Tensor:
    """The numbers of ``codes`` as the kernel multiplies them with ones, as weights or as rows."""
    n, cpu = codes.k if of_x else len(codes.weight), codes.device
    kernel = SkinnyGemm(
        n, codes.k, rows, NO_NORM, STORE, RMS_NORM, config, cpu, scale_columns=codes.k,
        e4m3_inputs=True,
    )  # fmt: skip
    found, ones = [], torch.eye(codes.k, device=cpu).to(E4M3)
    weight, weight_scale = codes.weight, codes.scale
    x, scale = ones, torch.full((codes.k, 1), 2.0, device=cpu)
    if of_x:
        weight, weight_scale, x, scale = ones, scale, codes.weight, codes.scale
    for part, own in zip(x.split(rows), scale.split(rows), strict=True):
        out = torch.full((len(part), n), float("nan"), device=cpu).bfloat16()
        kernel(part, weight, out, weight_scale=weight_scale, input_scale=own)
        found.append(out)
    whole = torch.cat(found).float()
    return (whole if of_x else whole.T) / 2


@on_both("rows", "config", "of_x", gpu=[(*p, o) for p in [*_PLACES, *_MORE_PLACES] for o in (0, 1)],
         small=[(*_PLACES[0], 0), (*_PLACES[1], 1)])  # fmt: skip
def test_every_number_of_e4m3_is_multiplied_exactly(
    device: torch.device, rows: int, config: TileConfig, of_x: int
) -> None:
    """Subnormals and both zeros too, each at its place, with its row's scale."""
    codes = Codes(96, 256, 256, device)
    assert torch.equal(_one_by_one(codes, config, rows, of_x=bool(of_x)), codes.wanted)


@pytest.mark.sweep
@emulated
@pytest.mark.parametrize(("rows", "config"), _MORE_PLACES)
def test_and_in_other_configs(
    rows: int, config: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    codes = Codes(96, 256, 256, torch.device("cpu"))
    for of_x in (False, True):
        assert torch.equal(_one_by_one(codes, config, rows, of_x=of_x), codes.wanted)


@on_both(
    "k", "config", gpu=[(192, _PLACES[0][1]), (448, _PLACES[1][1])], small=[(192, _PLACES[0][1])]
)
def test_a_row_may_end_within_a_stage(device: torch.device, k: int, config: TileConfig) -> None:
    codes = Codes(96, k, k, device)
    for of_x in (False, True):
        assert torch.equal(_one_by_one(codes, config, 32, of_x=of_x), codes.wanted)


def _with(monkeypatch: pytest.MonkeyPatch, there: str, instead: str) -> None:
    """Break the kernel's source."""
    text = emulator.source_text("skinny_gemm_wgmma")
    assert text.count(there) == 1
    emulator.install(monkeypatch)
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        skinny_gemm, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )


SCALED = "#if !SUMS\n" + (cuda.SOURCES / "include" / "skinny_gemm_scale.cuh").read_text()
FAULTS = [
    (SCALED, SCALED.replace("v[j] *= scale[m].y;", "", 1)),
    ("+ min(m, M - 1)", "+ min(m / 2, M - 1)"),  # another token's scale
    ("                           k > 0);", "                           true);"),  # one part in all
    ("await_wgmma<MT * 8, 1>", "await_wgmma<MT * 8, 2>"),  # the part is not there yet
    ("part[r % 2], weights", "part[0], weights"),  # and the next one overwrites it
    ("weights + r * 64 * 128 + k * 32, weights", "weights + r * 64 * 128 + k * 16, weights"),
    (
        "weights + WEIGHT_BYTES + k * 32,\n                           k",
        "weights + WEIGHT_BYTES,\nk",
    ),
]


@pytest.mark.sweep(of=2)
@emulated
@pytest.mark.parametrize(("there", "instead"), FAULTS)
def test_faults_of_the_kernel_show(
    there: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, there, instead)
    gemm = Quantized(torch.device("cpu"), 192, 512, STORE, False, 20)
    try:
        out, _ = gemm.run(gemm.kernel(_wgmma(12)))
    except AssertionError:
        return  # the emulator saw it
    assert not relative_error(out, gemm.wanted()) < LIMIT


class Quantized(Gemm):
    """A GEMM over rows that are quantized, by token."""

    def __init__(
        self, device: torch.device, n: int, k: int, epilogue: int, bias: bool, rows: int
    ) -> None:
        super().__init__(device, n, k, NO_NORM, epilogue, bias, rows, k)
        self.x = self.x * torch.logspace(-2, 2, rows, device=device)[:, None]
        self.numbers, self.scale = quantize_inputs(self.x, 1)
        self.x = self.numbers.double() * self.scale.double()

    def kernel(self, config: TileConfig, statistics_norm: int = RMS_NORM) -> Any:
        made = SkinnyGemm(
            self.n, self.k, padded(self.rows), NO_NORM, self.epilogue, statistics_norm, config,
            self.device, scale_columns=self.k, e4m3_inputs=True,
        )  # fmt: skip

        def call(x: Tensor, *given: Any, **options: Any) -> None:
            made(self.numbers, *given, input_scale=self.scale, **options)

        call.statistic_rows = made.statistic_rows  # type: ignore[attr-defined]
        return call


_GEMMS: list[tuple[tuple[int, int, int, bool], int, TileConfig]] = [
    ((128, 512, SILU_GATE, True), 32, _wgmma(4, 2, workspace=True)),
    ((128, 640, ADD, True), 42, _wgmma(8, 4)),
    ((80, 384, SQUARED_RELU, False), 64, _wgmma(2, persistent=True)),
    ((205, 256, STORE, False), 30, _wgmma(9, 2)),
    ((96, 384, GELU_TANH, True), 17, _wgmma(6, stages=3)),
    ((64, 256, ADD, False), 64, _wgmma(2)),
]
_LARGE = [
    ((n, k, epilogue, bias), rows, None)
    for n, k, epilogue, bias in (
        (6144, 4096, STORE, True), (4096, 14336, ADD, False), (28672, 4096, SILU_GATE, False),
        (1024, 3072, ADD, True), (4096, 1024, STORE, False),
    )
    for rows in (17, 32, 48, 64)
]  # fmt: skip


@pytest.mark.sweep(of=3)
@on_both("shape", "rows", "config", gpu=[*_GEMMS, *_LARGE], small=_GEMMS)
def test_equals_float64(
    device: torch.device,
    shape: tuple[int, int, int, bool],
    rows: int,
    config: TileConfig | None,
) -> None:
    """All epilogues, ways to share K, bias, statistics, and the copy for the next norm."""
    (n, k, epilogue, bias), statistics_norm = shape, LAYER_NORM if rows % 2 else RMS_NORM
    gemm = Quantized(device, n, k, epilogue, bias, rows)
    configs = [config] if config is not None else _configs(n, k, rows, epilogue)
    for each in configs:
        kernel = gemm.kernel(each, statistics_norm)
        out, error = gemm.run(kernel, statistics_norm)
        assert relative_error(out, gemm.wanted()) < LIMIT and error < 1e-3, each
        again, _ = gemm.run(kernel, statistics_norm)
        assert torch.equal(out, again)


def _configs(n: int, k: int, rows: int, epilogue: int) -> list[TileConfig]:
    problem = GemmProblem(padded(rows), n, k, NO_NORM, epilogue, k, True)
    found = find(problem, sm_count=SMS)
    assert found is not None
    return [found.config, *deepest(problem, tma=True, sm_count=SMS)[::7]]


@pytest.mark.sweep
@emulated
def test_partial_sums_are_sent_to_other_ranks_as_they_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    n, k, rows, ranks, cpu = 64, 256, 24, 2, torch.device("cpu")
    memory = tuple(torch.zeros(2 * ranks * 32 * n // 2, dtype=torch.int64) for _ in range(ranks))
    sends = Sending(memory, 1, torch.zeros(1, dtype=torch.int32), 32 * n)
    gemm = Quantized(cpu, n, k, STORE, False, rows)
    stored = torch.empty(rows, n).bfloat16()
    for out, to in ((stored, None), (None, sends)):
        kernel = SkinnyGemm(
            n, k, 32, NO_NORM, STORE, LAYER_NORM, _wgmma(2, 2), cpu, to, k, e4m3_inputs=True
        )
        kernel(
            gemm.numbers, gemm.weight, out, weight_scale=gemm.weight_scale, input_scale=gemm.scale
        )
    place = (1 * ranks + 1) * 32 * n // 2  # of launch 1, from rank 1
    words = memory[0][place : place + rows * n // 2]
    assert (words >> 32 == 1).all()
    pairs = words.view(rows // 8, n // 8, 8, 4).to(torch.int32).transpose(1, 2)
    assert torch.equal(pairs.reshape(rows, n // 2).contiguous().view(torch.bfloat16), stored)


@emulated
def test_a_kernel_takes_inputs_in_e4m3_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    gemm = Quantized(torch.device("cpu"), 80, 256, STORE, False, 32)
    kernel = SkinnyGemm(
        80, 256, 32, NO_NORM, STORE, RMS_NORM, _wgmma(5), gemm.device, scale_columns=256,
        e4m3_inputs=True,
    )  # fmt: skip
    out, given = torch.full((32, 80), 7.0).bfloat16(), {"weight_scale": gemm.weight_scale}
    with pytest.raises(TypeError, match="x must be torch\\.float8_e4m3fn"):
        kernel(gemm.numbers.bfloat16(), gemm.weight, out, **given, input_scale=gemm.scale)
    with pytest.raises(TypeError, match="input_scale must be a Tensor"):
        kernel(gemm.numbers, gemm.weight, out, **given)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("values", "norm", "columns"),
    [({"tma": False}, NO_NORM, 512), ({}, RMS_NORM, 512), ({}, NO_NORM, 128), ({}, NO_NORM, 0)],
)
def test_what_cannot_be_built_does_not_fit(values: Any, norm: int, columns: int) -> None:
    config = _wgmma(4)._replace(**values)
    assert not config.fits(64, 512, 32, norm, STORE, scale_columns=columns, e4m3_inputs=True)
    assert _wgmma(4).fits(64, 512, 32, NO_NORM, STORE, scale_columns=512, e4m3_inputs=True)


@pytest.mark.parametrize("rows", [32, 48, FEW_ROWS])
def test_shapes_of_models_have_a_config(rows: int) -> None:
    shapes = [shape[:4] for shape in GEMMS.values() if shape[1] % E4M3_STAGE_K == 0]
    small = [(192, 256, RMS_NORM, STORE), (128, 128, NO_NORM, ADD), (512, 256, NO_NORM, SILU_GATE)]
    for n, k, _, epilogue in [*shapes[::4], *small]:
        given = {"sm_count": SMS, "scale_columns": k}
        found = choose(n, k, rows, NO_NORM, epilogue, **given, e4m3_inputs=True)
        assert found is not None and found.tma, (n, k)
        assert found.fits(n, k, rows, NO_NORM, epilogue, scale_columns=k, e4m3_inputs=True)
        assert choose(n, k, rows, NO_NORM, epilogue, False, **given, e4m3_inputs=True) is None


@pytest.mark.parametrize("rows", [32, FEW_ROWS])
def test_configs_of_large_weights_read_more_of_them_than_of_inputs(rows: int) -> None:
    """Each CTA reads all rows of x, so tiles are not flat, and nearly all SMs have one or two."""
    for n, k, epilogue in ((6144, 4096, STORE), (4096, 14336, ADD), (28672, 4096, SILU_GATE)):
        entry = find(GemmProblem(rows, n, k, NO_NORM, epilogue, k, True), sm_count=SMS)
        assert entry is not None and entry.source == HEURISTIC
        assert entry.config.weight_rows >= rows and SMS * 0.7 <= entry.config.ctas(n) <= 2 * SMS


def test_the_search_tries_configs_that_take_inputs_in_e4m3_alone() -> None:
    problem = GemmProblem(32, 6144, 4096, NO_NORM, STORE, 4096, True)
    options = {"tma": True, "sm_count": SMS}
    for configs in (short_list(problem, 4, **options), spread(problem, 4, **options)):
        assert configs and all(config.can_serve(problem) for config in configs)


def test_an_entry_of_a_table_says_that_inputs_are_e4m3() -> None:
    problem = GemmProblem(32, 6144, 4096, scale_columns=4096, e4m3_inputs=True)
    entry = Entry(problem, _wgmma(4), HEURISTIC)
    line = entry.to_json()
    assert '"e4m3_inputs": true' in line
    assert Entry.from_json(json.loads(line)) == entry
    for wrong in ({"e4m3_inputs": 1}, {"scale_columns": 128}, {"tma": False}):
        with pytest.raises(ValueError, match=r"expected|no kernel"):
            Entry.from_json({**json.loads(line), **wrong})


@emulated
def test_the_bound_of_shared_memory_is_that_of_the_source() -> None:
    macros, bounds = [], []
    for (n, k, epilogue, _), rows, config in _GEMMS:
        most = padded(rows)
        macros.append(
            skinny_gemm.defines(
                n,
                k,
                most,
                NO_NORM,
                epilogue,
                RMS_NORM,
                config,
                SMS,
                scale_columns=k,
                e4m3_inputs=True,
            )
        )
        bounds.append(config.shared_bytes(k, most, k, True))
    found = emulator.shared_bytes("skinny_gemm_wgmma", macros)
    for taken, bound in zip(found, bounds, strict=True):
        assert 0 <= bound - taken <= 16384
