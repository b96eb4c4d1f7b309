"""The search for tilings, with a table of times in place of a GPU."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_async.kernels.cuda import compile as cuda
from megatron_async.kernels.cuda.tilings import (
    LAYER_NORM,
    MULTIPROCESSORS,
    RMS_NORM,
    SHARED_BYTES,
    STORE,
    UNIT,
    Tiling,
)
from megatron_async.models.fused_decode import Product

PRODUCT = Product(6144, 4096, RMS_NORM, STORE)


@pytest.fixture(scope="module")
def tuner() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "tune_decode.py"
    spec = importlib.util.spec_from_file_location("tune_decode", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rig:
    """Steps take what ``time`` says of the product's tiling."""

    rows = 32

    def __init__(self, time: Callable[[Tiling], float]) -> None:
        self.time = time

    def decoder(self, tilings: dict[str, Tiling]) -> Any:
        return SimpleNamespace(products={"qkv": PRODUCT}, defines=lambda *_: {})

    def compile(self, tilings: dict[str, Tiling]) -> None:
        self.compiled = tilings

    def step_us(self, tilings: dict[str, Tiling]) -> float:
        return self.time(tilings["qkv"])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels were compiled together, each time."""
    counts: list[int] = []
    monkeypatch.setattr(cuda, "architecture", lambda index: "none")
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: counts.append(len(work)))
    return counts


def test_finds_the_fastest_and_drops_what_changes_the_logits(
    tuner: ModuleType, compiled: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    first = PRODUCT.tiling(32)
    assert first is not None
    wrong, fastest = first._replace(stages=2), first._replace(memory=True)

    def time(tiling: Tiling) -> float:
        if tiling == wrong:
            raise ArithmeticError("relative error 1")
        return 900.0 if tiling == fastest else 999.0 if tiling != first else 1000.0

    search = tuner.Search(Rig(time), math.inf)
    search.vary("qkv", [wrong, *tuner.neighbours(first), first._replace(splits=3)])
    assert search.best == {"qkv": fastest}
    assert (search.first, search.step) == (1000.0, 900.0)
    assert wrong not in {tiling for _, tiling, _ in search.log}
    assert "dropped qkv" in capsys.readouterr().out
    tried = len(search.log)
    search.vary("qkv", [tiling for _, tiling, _ in search.log])
    assert len(search.log) == tried and compiled[1] == 0


def test_keeps_the_best_constants(
    tuner: ModuleType, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(WARPS=4, STAGES=2)
    search = tuner.Search(Rig(lambda _: 100.0 - room.WARPS + room.STAGES), math.inf)
    tuner.vary_constants(search, room, ["WARPS", "STAGES"], [(8, 3), (8, 2), (2, 2)])
    assert (room.WARPS, room.STAGES, search.step) == (8, 2, 94.0)
    assert search.rig.compiled == search.best


def test_the_spread_has_tilings_of_both_kinds_that_can_be_built(tuner: ModuleType) -> None:
    found = tuner.spread(PRODUCT, 32, 20)
    assert {tiling.box for tiling in found} == {False, True} and len(set(found)) == 40
    assert all(t.fits(6144, 4096, 32, RMS_NORM, STORE) for t in found)
    found = tuner.spread(replace(PRODUCT, boxes=False), 32, 20)
    assert not any(tiling.box for tiling in found)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (5120, 3072), (1024, 2048), (50257, 768)])
def test_even_tilings_run_at_once_and_can_be_built(
    tuner: ModuleType, n: int, k: int, rows: int
) -> None:
    found = tuner.even(replace(PRODUCT, n=n, k=k), rows, 24)
    assert found and len(set(found)) == len(found) <= 36
    for tiling in found:
        assert tiling.fits(n, k, rows, RMS_NORM, STORE)
        together = math.ceil(tiling.blocks(n) / MULTIPROCESSORS)
        assert together * (tiling.shared_bytes(k, rows) + 1024) <= SHARED_BYTES
        assert tiling.stages <= math.ceil(k / UNIT / (tiling.splits * tiling.warps_k))
        alike = [t for t in found if t.box == tiling.box and t.splits == tiling.splits]
        assert sum(t.weight_rows == tiling.weight_rows for t in alike) <= 3
    if n == 5120:  # 128 blocks of the same size: nothing is more even
        best = found[0]
        assert best.blocks(n) * best.weight_rows == n * best.splits
        assert n // best.weight_rows * best.splits in (128, 256, 384, 512)


def test_the_short_list_begins_with_what_is_known(tuner: ModuleType) -> None:
    found = tuner.short_list(PRODUCT, 8, 24)
    measured = tuner.known(6144, 4096)
    assert found[: len(measured)] == measured and len(measured) >= 3
    assert found[len(measured) :] == tuner.even(PRODUCT, 8, 24)
    assert tuner.short_list(PRODUCT, 64, 24) == tuner.fullest(PRODUCT, 64)


def test_many_rows_begin_with_boxes_that_can_be_built(tuner: ModuleType) -> None:
    unknown = replace(PRODUCT, n=6400)
    for rows in (48, 64):
        assert unknown.tiling(rows) is None
        found = tuner.fullest(unknown, rows)
        shape = (unknown.n, unknown.k, rows, RMS_NORM, STORE)
        assert len(set(found)) == len(found) > 10
        assert all(tiling.box and tiling.fits(*shape) for tiling in found)
        for tiling in found:
            more = tiling._replace(stages=tiling.stages + 1)
            bytes_ = [t.shared_bytes(unknown.k, rows) for t in (tiling, more)]
            assert tiling.stages == 10 or any(
                bytes_[0] <= limit < bytes_[1] for limit in (SHARED_BYTES, SHARED_BYTES // 2)
            )
        assert tuner.start_of(unknown, rows) in found
    assert tuner.start_of(PRODUCT, 64) == PRODUCT.tiling(64)
    with pytest.raises(ValueError, match="6400 x 4096"):
        tuner.start_of(replace(unknown, norm=LAYER_NORM), 64)


def test_stops_in_time(tuner: ModuleType, compiled: list[int]) -> None:
    search = tuner.Search(Rig(lambda _: 1.0), -math.inf)
    search.vary("qkv", list(tuner.neighbours(search.best["qkv"])))
    assert search.log == [] and compiled == []


def test_neighbours_reach_every_field_and_what_is_printed_can_be_pasted(tuner: ModuleType) -> None:
    tiling = Tiling(2, 4, 1, 4, 4, stream=True, persistent=True)
    found = list(tuner.neighbours(tiling))
    box = Tiling(8, 1, 1, 4, 4, stream=True, persistent=True, box=True)
    assert box in found and tiling._replace(row_tiles=1, warps_n=8) in tuner.neighbours(box)
    for field in set(Tiling._fields) - {"persistent"}:  # which follows from the number of blocks
        assert len({getattr(t, field) for t in found}) > 1, field
    for each in (tiling, tiling._replace(memory=True), Tiling(1, 1, 8, 1, 3)):
        shape, _, text = tuner.line_of(PRODUCT, each).rstrip(",").partition(": ")
        assert eval(shape) == (6144, 4096)
        assert eval(text, {"Tiling": Tiling}) == each
