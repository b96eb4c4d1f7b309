"""``megatron-async tune`` and its search, with a table of times in place of a GPU."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_async import checkpoint
from megatron_async.checkpoint import describe_pretrained, load_pretrained
from megatron_async.engine import build
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.inference import tune_search as tuner
from megatron_async.inference.cli.main import main
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import tuned
from megatron_async.kernels.gemm.estimated_tilings import LEAST_STAGES
from megatron_async.kernels.gemm.tilings import (
    LAYER_NORM,
    MULTIPROCESSORS,
    RMS_NORM,
    SHARED_BYTES,
    STORE,
    UNIT,
    Tiling,
)
from megatron_async.models.fused.decoder import FusedDecoder, Product
from tests.support.engines import config_at, greedy

PRODUCT = Product(6144, 4096, RMS_NORM, STORE)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "tune_decode.py"
    spec = importlib.util.spec_from_file_location("tune_decode", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rig:
    """Steps take what ``time`` says of the product's tiling."""

    rows = 32
    device = torch.device("cuda", 0)

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


def test_finds_the_fastest_and_drops_what_changes_the_logits(compiled: list[int]) -> None:
    first = PRODUCT.tiling(32)
    assert first is not None
    wrong, fastest = first._replace(stages=2), first._replace(memory=True)

    def time(tiling: Tiling) -> float:
        if tiling == wrong:
            raise ArithmeticError("relative error 1")
        return 900.0 if tiling == fastest else 999.0 if tiling != first else 1000.0

    said: list[str] = []
    search = tuner.Search(Rig(time), report=said.append)
    search.vary("qkv", [wrong, *tuner.neighbours(first), first._replace(splits=3)])
    assert search.best == {"qkv": fastest}
    assert (search.first, search.step) == (1000.0, 900.0)
    assert wrong not in {tiling for _, tiling, _ in search.log}
    assert any(line.startswith("dropped qkv") for line in said)
    assert any(line.endswith("1000.0 -> 900.0 us") for line in said)
    tried = len(search.log)
    search.vary("qkv", [tiling for _, tiling, _ in search.log])
    assert len(search.log) == tried and compiled[1] == 0


def test_keeps_the_best_constants(
    script: ModuleType, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(WARPS=4, STAGES=2)
    search = tuner.Search(Rig(lambda _: 100.0 - room.WARPS + room.STAGES), math.inf)
    script.vary_constants(search, room, ["WARPS", "STAGES"], [(8, 3), (8, 2), (2, 2)])
    assert (room.WARPS, room.STAGES, search.step) == (8, 2, 94.0)
    assert search.rig.compiled == search.best


def test_the_spread_has_tilings_of_both_kinds_that_can_be_built() -> None:
    found = tuner.spread(PRODUCT, 32, 20)
    assert {tiling.box for tiling in found} == {False, True} and len(set(found)) == 40
    assert all(t.fits(6144, 4096, 32, RMS_NORM, STORE) for t in found)
    found = tuner.spread(replace(PRODUCT, boxes=False), 32, 20)
    assert not any(tiling.box for tiling in found)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (5120, 3072), (1024, 2048), (50257, 768)])
def test_even_tilings_run_at_once_and_can_be_built(n: int, k: int, rows: int) -> None:
    found = tuner.even(replace(PRODUCT, n=n, k=k), rows, 24)
    assert found and len(set(found)) == len(found) <= 36
    for tiling in found:
        assert tiling.fits(n, k, rows, RMS_NORM, STORE)
        together = 2 if tiling.persistent else math.ceil(tiling.blocks(n) / MULTIPROCESSORS)
        taken = together * (tiling.shared_bytes(k, rows) + 1024)
        assert taken <= SHARED_BYTES or tiling.stages == LEAST_STAGES
        assert tiling.stages <= math.ceil(k / UNIT / (tiling.splits * tiling.warps_k))
        alike = [t for t in found if t.box == tiling.box and t.splits == tiling.splits]
        assert sum(t.weight_rows == tiling.weight_rows for t in alike) <= 3
    if n == 5120:  # 128 blocks of the same size: nothing is more even
        best = found[0]
        assert best.blocks(n) * best.weight_rows == n * best.splits
        assert n // best.weight_rows * best.splits in (128, 256, 384, 512)


def test_the_short_list_begins_with_what_is_known() -> None:
    found = tuner.short_list(PRODUCT, 8, 24)
    measured = tuner.known(6144, 4096)
    assert found[: len(measured)] == measured and len(measured) >= 3
    assert found[len(measured) :] == tuner.even(PRODUCT, 8, 24)
    assert tuner.short_list(PRODUCT, 64, 24) == tuner.fullest(PRODUCT, 64)


def test_many_rows_begin_with_boxes_that_can_be_built() -> None:
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


def test_stops_in_time(compiled: list[int]) -> None:
    search = tuner.Search(Rig(lambda _: 1.0), -math.inf)
    search.vary("qkv", list(tuner.neighbours(search.best["qkv"])))
    assert search.log == [] and compiled == []


def test_neighbours_reach_every_field_and_what_is_printed_can_be_pasted() -> None:
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


# --- the command ----------------------------------------------------------------------------------


class FewProducts(Rig):
    """In place of a rig: boxes take half the time, except for the head; all else the same."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, config: Any, rows: int, **options: Any) -> None:
        super().__init__(lambda tiling: 0.0)
        self.rows = rows
        self.sizes.append(rows)
        names = ("fc1", "fc2", "qkv", "projection", "head")
        self.products = {name: replace(PRODUCT, n=512 * i) for i, name in enumerate(names, 2)}

    def decoder(self, tilings: dict[str, Tiling]) -> Any:
        return SimpleNamespace(products=self.products, defines=lambda *_: {})

    def step_us(self, tilings: dict[str, Tiling]) -> float:
        return sum(5.0 if t.box and name != "head" else 10.0 for name, t in tilings.items())

    def compare(self, before: Any, after: Any) -> tuple[float, float]:
        return self.step_us(before), self.step_us(after)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[int]) -> None:
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "device_name", lambda index: "A GPU")
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    monkeypatch.setattr(FewProducts, "sizes", [])
    monkeypatch.setattr(tuner, "Rig", FewProducts)


@pytest.mark.usefixtures("gpu")
def test_the_command_keeps_what_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--model", "tiny", "--batch-sizes", "7,2,8,1"]) == 0
    out, _ = capsys.readouterr()
    assert FewProducts.sizes == [1, 2, 8], "a batch of 7 takes the kernels of 8"
    assert str(tmp_path / tuned.FILE) in out and "A GPU" in out
    found = tuned.load("A GPU")
    for size in (1, 2, 8):
        mine = {case.n: tiling for case, tiling in found.items() if case.rows == size}
        assert mine and 512 * 6 not in mine, "the head's are as fast as before"
        assert all(tiling.box for tiling in mine.values())
    rows = [line.split() for line in out.splitlines() if line.split()[0] in "128"]
    assert [row[0] for row in rows] == ["1", "2", "8"]
    assert all(float(row[2]) < float(row[1]) and row[3].endswith("%") for row in rows)


@pytest.mark.usefixtures("gpu")
def test_nothing_is_kept_where_nothing_is_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FewProducts, "compare", lambda *_: (50.0, 50.5))
    assert main(["tune", "--model", "tiny", "--batch-sizes", "4"]) == 0
    assert "nothing is faster" in capsys.readouterr().out
    assert tuned.load("A GPU") == {}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "tiny", "--context", "4096"], "--context 4096"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", "tiny", "--batch-sizes", "33"], "between 1 and 32"),
        ([], "--model"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["tune", *options])
    except SystemExit as exit:
        status = exit.code
    assert status == 2 and FewProducts.sizes == []
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.usefixtures("gpu")
def test_a_model_that_the_fused_step_does_not_take_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("its heads are odd")

    monkeypatch.setattr(tuner, "Rig", refuse)
    assert main(["tune", "--model", "tiny"]) == 2
    assert "its heads are odd" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "tiny", "--device", "cpu"]) == 2
    assert "run it on a GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("error", "says"),
    [(torch.OutOfMemoryError("no"), "lower --batch-sizes"), (ArithmeticError("nan"), "nan")],
)
def test_a_step_that_cannot_be_measured_is_an_error_and_what_was_found_stays(
    error: Exception, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step_us = FewProducts.step_us

    def fail_at_8(rig: FewProducts, tilings: dict[str, Tiling]) -> float:
        if rig.rows == 8:
            raise error
        return step_us(rig, tilings)

    monkeypatch.setattr(FewProducts, "step_us", fail_at_8)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "2,8"]) == 2
    assert says in capsys.readouterr().err
    assert {case.rows for case in tuned.load("A GPU")} == {2}


@pytest.mark.usefixtures("gpu")
def test_tilings_that_fail_are_counted_and_a_model_of_another_dtype_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_boxes(rig: FewProducts, tilings: dict[str, Tiling]) -> float:
        if any(tiling.box for tiling in tilings.values()):
            raise RuntimeError("linear failed: CUDA_ERROR_INVALID_VALUE")
        return 1.0

    monkeypatch.setattr(FewProducts, "step_us", no_boxes)
    tiny = describe_pretrained("tiny")
    half = replace(tiny, dtype=torch.float16)
    monkeypatch.setattr(checkpoint, "describe_pretrained", lambda path: half)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "2"]) == 0
    out, err = capsys.readouterr()
    assert "nothing is faster" in out
    assert "tilings failed" in err and "CUDA_ERROR_INVALID_VALUE" in err
    assert "float16 model" in err and "--dtype bfloat16" in err


@pytest.mark.usefixtures("gpu")
def test_nothing_is_measured_where_nothing_can_be_kept_or_no_kernel_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "file"))
    assert main(["tune", "--model", "tiny"]) == 2
    assert "MEGATRON_ASYNC_CACHE" in capsys.readouterr().err
    monkeypatch.setattr(cuda, "unavailable", lambda index: "cuda.bindings is not installed")
    assert main(["tune", "--model", "tiny"]) == 2
    assert "cuda.bindings" in capsys.readouterr().err
    assert FewProducts.sizes == []


def test_a_description_is_read_without_weights(tmp_path: Path) -> None:
    whole = load_pretrained("tiny")
    config = Path(checkpoint.__file__).parents[1] / "assets" / "tiny" / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    (tmp_path / "model.safetensors").touch()
    description = describe_pretrained(tmp_path)
    assert description.config == whole.config and description.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engines_use_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))

    def tokens(depth: int) -> tuple[list[list[int]], dict[str, Tiling | None]]:
        config = config_at(depth, device="cuda", dtype="bfloat16", max_requests=4)
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            done = engine.generate(["import os", "def f(x):", "class A:"], greedy(60))
            model = engine.controller.inference_wrapped_model.model
            products = FusedDecoder(model).products
        return [request.generated_tokens for request in done], {
            name: product.tiling(4) for name, product in products.items()
        }

    before, known = tokens(0)
    name = cuda.device_name(0)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "4", "--count", "4"]) == 0
    # Whether something is faster differs; here all products are cut otherwise.
    model = load_pretrained("tiny", device="cuda", dtype=torch.bfloat16).model
    product = FusedDecoder(model).products
    others = {}
    for key, each in product.items():
        choices = [tiling for tiling in tuner.even(each, 4, 8) if tiling != known[key]]
        others[each.case(4)] = choices[0]
    tuned.save(name, others)
    after, used = tokens(0)
    assert used == {key: others[each.case(4)] for key, each in product.items()} != known
    assert tokens(1)[0] == after
    # Sums are cut otherwise, so near ties may fall otherwise: not the first tokens.
    assert [some[:4] for some in after] == [some[:4] for some in before]
