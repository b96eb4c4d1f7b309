"""``megatron-async tune`` and its search, with a table of times in place of a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_async import checkpoint, device
from megatron_async.checkpoint import describe_pretrained, load_pretrained
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_choice import MIN_STAGES
from megatron_async.kernels.gemm.tile_config import (
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SHARED_BYTES,
    STAGE_K,
    STORE,
    TUNED,
    USER_FILE,
    Entry,
    GemmProblem,
    TileConfig,
    load_tuned,
    save_tuned,
)
from megatron_async.kernels.gemm.untuned import search
from megatron_async.kernels.gemm.untuned.ranking import ranked
from megatron_async.kernels.gemm.untuned.search import known_configs, neighbours
from megatron_async.models.build import build_random_model
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.fused import coverage, timed_step, where
from megatron_async.models.fused import tuning as tuner
from megatron_async.models.fused.blocks.gemms import Gemm
from megatron_async.models.fused.blocks.moe_block import is_mixture
from megatron_async.models.fused.decoder import FusedDecoder
from tests.support import emulator
from tests.support.cuda_kernels import emulated
from tests.support.engines import config_at, greedy

SMS = 132
PRODUCT = Gemm(6144, 4096, RMS_NORM, STORE, sm_count=SMS)
PROBLEM = PRODUCT.case(32)
HOPPER: dict[str, Any] = {"tma": True, "sm_count": SMS}


class Rig:
    """Steps take what ``time`` says of the product's config."""

    rows = 32
    device = torch.device("cuda", 0)

    def __init__(self, time: Callable[[TileConfig], float]) -> None:
        self.time = time

    def decoder(self, configs: dict[str, TileConfig]) -> Any:
        return SimpleNamespace(gemms={"qkv": PRODUCT}, defines=lambda *_: {})

    def compile(self, configs: dict[str, TileConfig]) -> None:
        self.compiled = configs

    def step_us(self, configs: dict[str, TileConfig]) -> float:
        return self.time(configs["qkv"])


class OneProduct(Rig):
    """Of another product and number of rows."""

    def __init__(self, product: Gemm, rows: int) -> None:
        super().__init__(lambda config: 1.0)
        self.product, self.rows = product, rows

    def decoder(self, configs: dict[str, TileConfig]) -> Any:
        return SimpleNamespace(gemms={"qkv": self.product}, defines=lambda *_: {})


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
    wrong, fastest = first._replace(stages=2), first._replace(workspace=True)

    def time(config: TileConfig) -> float:
        if config == wrong:
            raise ArithmeticError("relative error 1")
        return 900.0 if config == fastest else 999.0 if config != first else 1000.0

    said: list[str] = []
    search = tuner.Search(Rig(time), report=said.append)
    search.vary("qkv", [wrong, *neighbours(first), first._replace(split_k=3)])
    assert search.best == {"qkv": fastest}
    assert (search.first, search.step) == (1000.0, 900.0)
    assert wrong not in {config for _, config, _ in search.log}
    assert any(line.startswith("dropped qkv") for line in said)
    assert any(line.endswith("1000.0 -> 900.0 us") for line in said)
    tried = len(search.log)
    search.vary("qkv", [config for _, config, _ in search.log])
    assert len(search.log) == tried and compiled[1] == 0


def test_keeps_the_best_constants(compiled: list[int]) -> None:
    module: Any = SimpleNamespace(WARPS=4, STAGES=2)
    search = tuner.Search(Rig(lambda _: 100.0 - module.WARPS + module.STAGES), math.inf)
    search.vary_constants(module, ["WARPS", "STAGES"], [(8, 3), (8, 2), (2, 2)])
    assert (module.WARPS, module.STAGES, search.step) == (8, 2, 94.0)
    assert search.rig.compiled == search.best


def test_the_exhaustive_search_leaves_constants_as_they_were(compiled: list[int]) -> None:
    (attention, names, choices), (gemm, (alone,), _) = tuner.CONSTANTS
    before = [getattr(attention, name) for name in names]
    seen: list[tuple[int, ...]] = []

    def time(config: TileConfig) -> float:
        seen.append(tuple(getattr(attention, name) for name in names))
        return 10.0 if seen[-1] == choices[2] else 11.0 + config.stages

    search = tuner.Search(Rig(time))
    tuner.search_all(search, ["qkv"], 1, 5)
    assert set(choices) <= set(seen) and seen[-1] == choices[2], "the best stay for the search"
    assert [getattr(attention, name) for name in names] == before
    assert getattr(gemm, alone) == 116 * 1024
    assert len(search.log) > 20


def test_the_spread_has_configs_of_both_kernels_that_can_be_built() -> None:
    found = search.spread(PROBLEM, 20, **HOPPER)
    assert {config.tma for config in found} == {False, True} and len(set(found)) == 40
    assert all(config.can_serve(PROBLEM) for config in found)
    found = search.spread(PROBLEM, 20, tma=False, sm_count=SMS)
    assert found and not any(config.tma for config in found)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (5120, 3072), (1024, 2048), (50257, 768)])
def test_balanced_configs_run_at_once_and_can_be_built(n: int, k: int, rows: int) -> None:
    problem = GemmProblem(rows, n, k, RMS_NORM, STORE)
    found = search.balanced(problem, 24, **HOPPER)
    assert found and len(set(found)) == len(found) <= 36
    for config in found:
        assert config.can_serve(problem)
        resident = 2 if config.persistent else math.ceil(config.ctas(n) / SMS)
        taken = resident * (config.shared_bytes(k, rows) + 1024)
        assert taken <= SHARED_BYTES or config.stages == MIN_STAGES
        assert config.stages <= math.ceil(k / STAGE_K / (config.split_k * config.warps_k))
        alike = [c for c in found if c.tma == config.tma and c.split_k == config.split_k]
        assert sum(c.weight_rows == config.weight_rows for c in alike) <= 3
    if n == 5120:  # 128 CTAs of the same size: nothing is more balanced
        best = found[0]
        assert best.ctas(n) * best.weight_rows == n * best.split_k
        assert n // best.weight_rows * best.split_k in (128, 256, 384, 512)


def test_the_short_list_begins_with_what_is_known() -> None:
    problem = PRODUCT.case(8)
    found = search.short_list(problem, 24, **HOPPER)
    known = known_configs(6144, 4096)
    assert found[: len(known)] == known and len(known) >= 3
    assert found[len(known) :] == search.balanced(problem, 24, **HOPPER)
    wide = PRODUCT.case(64)
    found = [*ranked(wide, **HOPPER)[:48], *search.deepest(wide, **HOPPER)]
    assert search.short_list(wide, 24, **HOPPER) == found
    wide = wide._replace(norm=NO_NORM, scale_columns=4096, e4m3_inputs=True)
    assert search.short_list(wide, 24, **HOPPER) == search.deepest(wide, **HOPPER)
    many = PRODUCT.case(128)
    assert search.short_list(many, 24, **HOPPER) == list(ranked(many, **HOPPER))[:48]


def test_many_rows_begin_with_tma_configs_that_can_be_built(compiled: list[int]) -> None:
    unknown = replace(PRODUCT, n=6400)
    for rows in (48, 64):
        chosen = unknown.tiling(rows)
        assert chosen == ranked(unknown.case(rows), **HOPPER)[0] and chosen.multicast
        problem = unknown.case(rows)
        found = search.deepest(problem, **HOPPER)
        assert len(set(found)) == len(found) > 10
        assert all(config.tma and config.can_serve(problem) for config in found)
        for config in found:
            more = config._replace(stages=config.stages + 1)
            bytes_ = [c.shared_bytes(unknown.k, rows) for c in (config, more)]
            assert config.stages == 10 or any(
                bytes_[0] <= limit < bytes_[1] for limit in (SHARED_BYTES, SHARED_BYTES // 2)
            )
        for product in (unknown, PRODUCT):
            assert tuner.Search(OneProduct(product, rows)).best == {"qkv": product.tiling(rows)}
    with pytest.raises(ValueError, match="6400 x 4096"):
        search.deepest(unknown.case(64)._replace(norm=LAYER_NORM), **HOPPER)


def test_stops_in_time(compiled: list[int]) -> None:
    search = tuner.Search(Rig(lambda _: 1.0), -math.inf)
    search.vary("qkv", list(neighbours(search.best["qkv"])))
    assert search.log == [] and compiled == []


def test_neighbours_reach_every_field() -> None:
    config = TileConfig(2, 4, 1, 4, 4, stream_x=True, persistent=True)
    found = list(neighbours(config))
    by_tma = TileConfig(8, 1, 1, 4, 4, stream_x=True, persistent=True, tma=True)
    assert by_tma in found and config._replace(row_tiles=1, warps_n=8) in neighbours(by_tma)
    # That a config is persistent follows from the number of CTAs, and the kernel of many rows from
    # that of rows.
    for field in set(TileConfig._fields) - {"persistent", "multicast"}:
        assert len({getattr(each, field) for each in found}) > 1, field
    assert {each.multicast for each in found} == {0}


def test_neighbours_of_many_rows_reach_what_its_kernel_has() -> None:
    problem = GemmProblem(128, 6144, 4096, RMS_NORM, STORE)
    config = TileConfig(6, 1, 1, 2, 5, stream_x=True, tma=True, multicast=2)
    assert config.can_serve(problem)
    found = [each for each in neighbours(config) if each.can_serve(problem)]
    for field in ("row_tiles", "split_k", "stages", "workspace", "multicast"):
        assert len({getattr(each, field) for each in found}) > 1, field
    assert {each.kernel for each in found} == {"skinny_gemm_many"}


def test_which_experts_are_chosen_does_not_change_a_timed_step() -> None:
    config = replace(SHAPES["tiny-qwen-moe"], num_layers=2)
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    (layer, *_) = (each.mlp for each in model.decoder.layers if is_mixture(each.mlp))
    hidden = torch.randn(5, 1, config.hidden_size)

    def outputs() -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            torch.nn.init.normal_(layer.router.weight)
            found.append(layer(hidden)[0])
        return found

    with torch.inference_mode():
        before, after = outputs()
        assert not torch.allclose(before, after)
        timed_step.equal_experts(model)
        before, after = outputs()
        torch.testing.assert_close(before, after)


def test_attention_in_modules_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(coverage, "attention_why_not", lambda layer, model: None)
    config = replace(SHAPES["tiny-llama"], num_layers=2)
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert timed_step.attention_in_modules(model) is None
    monkeypatch.setattr(coverage, "attention_why_not", lambda layer, model: "it has sinks")
    reason = timed_step.attention_in_modules(model)
    assert reason == "the attention of layer 1 is computed by its module: it has sinks"


@emulated
@pytest.mark.parametrize("quantize", (False, True))
def test_a_timed_step_has_all_that_the_blocks_ask_for(
    quantize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    config = replace(SHAPES["tiny-llama"], hidden_size=128, ffn_hidden_size=256, vocab_size=128)
    config = replace(config, num_attention_heads=2, num_kv_heads=1, head_dim=64)
    device = torch.device("cpu")
    rig = timed_step.Rig(config, 2, layers=1, context=5, device=device, quantize=quantize)
    step, logits = rig.decoder({}), torch.zeros(2, 128).bfloat16()
    assert step.takes(logits, rig.context)
    step.forward(rig.tokens, rig.positions, rig.context, logits)
    assert logits.isfinite().all() and logits.any()
    columns = {gemm.scale_columns for name, gemm in step.gemms.items() if name != "head"}
    assert (columns == {0}) is not quantize
    rig.close()


# --- the command ----------------------------------------------------------------------------------


class FewProducts(Rig):
    """In place of a rig: TMA configs take half the time, except for the head; all else the same."""

    sizes: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    def __init__(self, config: Any, rows: int, **options: Any) -> None:
        super().__init__(lambda config: 0.0)
        self.rows = rows
        self.sizes.append(rows)
        names = ("fc1", "fc2", "qkv", "projection", "head")
        self.gemms = {name: replace(PRODUCT, n=512 * i) for i, name in enumerate(names, 2)}

    def close(self) -> None:
        self.closed.append(self.rows)

    def decoder(self, configs: dict[str, TileConfig]) -> Any:
        return SimpleNamespace(gemms=self.gemms, defines=lambda *_: {})

    def step_us(self, configs: dict[str, TileConfig]) -> float:
        return sum(5.0 if t.tma and name != "head" else 10.0 for name, t in configs.items())

    def compare(self, before: Any, after: Any) -> tuple[float, float]:
        return self.step_us(before), self.step_us(after)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[int]) -> None:
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "device_name", lambda index: "A GPU")
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    monkeypatch.setattr(FewProducts, "sizes", [])
    monkeypatch.setattr(FewProducts, "closed", [])
    monkeypatch.setattr(timed_step, "Rig", FewProducts)


@pytest.mark.usefixtures("gpu")
def test_the_command_keeps_what_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--model", "tiny", "--batch-sizes", "7,2,8,1"]) == 0
    out, _ = capsys.readouterr()
    assert FewProducts.sizes == [1, 2, 8], "a batch of 7 takes the kernels of 8"
    assert FewProducts.closed == FewProducts.sizes, "the next rig may launch waiting grids"
    assert str(tmp_path / USER_FILE) in out and "A GPU" in out
    found = load_tuned("A GPU")
    for size in (1, 2, 8):
        mine = {problem.n: config for problem, config in found.items() if problem.rows == size}
        assert mine and 512 * 6 not in mine, "the head's are as fast as before"
        assert all(config.tma for config in mine.values())
    entries = json.loads((tmp_path / USER_FILE).read_text())["A GPU"]
    assert {entry["source"] for entry in entries} == {"tuned"}
    rows = [line.split() for line in out.splitlines() if line.split()[0] in "128"]
    assert [row[0] for row in rows] == ["1", "2", "8"]
    assert all(float(row[2]) < float(row[1]) and row[3].endswith("%") for row in rows)


@pytest.mark.usefixtures("gpu")
def test_a_dry_run_prints_lines_of_the_table_and_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dry-run", "--batch-sizes", "64", "--gemms", "fc1,qkv", "--log", f"{tmp_path}/log"]
    assert main(["tune", "--shape", "llama8b", *options]) == 0
    out, _ = capsys.readouterr()
    lines = [json.loads(line.rstrip(",")) for line in out.splitlines() if line.startswith("{")]
    entries = [Entry.from_json(line) for line in lines]
    assert [entry.problem.n for entry in entries] == [512 * i for i in (2, 3, 4, 5, 6)]
    assert all(entry.problem == GemmProblem(64, entry.problem.n, 4096) for entry in entries)
    assert {entry.source for entry in entries} == {"measured"} and load_tuned("A GPU") == {}
    log = json.loads((tmp_path / "log").read_text())["64"]
    assert {name for name, _, _ in log} == {"fc1", "qkv"}
    assert all(len(config) == len(TileConfig._fields) and us > 0 for _, config, us in log)


@pytest.mark.usefixtures("gpu")
def test_inputs_in_e4m3_are_tuned_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Quantized(FewProducts):
        def __init__(
            self, config: Any, rows: int, *, quantize: bool, quantize_activations: bool, **_: Any
        ) -> None:
            super().__init__(config, rows)
            assert quantize and quantize_activations
            self.gemms = {
                n: replace(g, scale_columns=g.k, quantizes=True) for n, g in self.gemms.items()
            }

        def step_us(self, configs: dict[str, TileConfig]) -> float:
            return sum(10.0 + config.stages for config in configs.values())

    monkeypatch.setattr(timed_step, "Rig", Quantized)
    command = ["tune", "--shape", "llama8b", "--batch-sizes", "8,32", "--quantize-activations"]
    assert main(command) == 2
    assert "add it" in capsys.readouterr().err
    assert main([*command, "--quantization", "fp8"]) == 0
    assert "weights in e4m3, and inputs" in capsys.readouterr().out
    found = {problem: config for problem, config in load_tuned("A GPU").items()}
    assert {(p.rows, p.e4m3_inputs) for p in found} == {(8, False), (32, True)}
    made = Quantized(None, 32, quantize=True, quantize_activations=True).gemms.values()
    changed = [gemm for gemm in made if gemm.case(32) in found]
    assert changed
    for gemm in changed:
        own = replace(gemm, found=found)
        assert own.tiling(32) == found[own.case(32)] != gemm.tiling(32)
        assert found[own.case(32)].tma and own.reads_e4m3(32)


@pytest.mark.usefixtures("gpu")
def test_weights_in_e4m3_are_tuned_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Quantized(FewProducts):
        def __init__(self, config: Any, rows: int, *, quantize: bool, **options: Any) -> None:
            super().__init__(config, rows)
            columns = 4096 if quantize else 0
            self.gemms = {n: replace(g, scale_columns=columns) for n, g in self.gemms.items()}

        def step_us(self, configs: dict[str, TileConfig]) -> float:
            return sum(10.0 + config.stages for config in configs.values())

    monkeypatch.setattr(timed_step, "Rig", Quantized)
    command = ["tune", "--shape", "llama8b", "--batch-sizes"]
    assert main([*command, "64", "--quantization", "fp8"]) == 0
    assert "e4m3" in capsys.readouterr().out
    assert {(p.rows, p.scale_columns) for p in load_tuned("A GPU")} == {(64, 4096)}
    assert main([*command, "64"]) == 2, "bfloat16 has no other kernel for so many"


@pytest.mark.usefixtures("gpu")
def test_nothing_is_kept_where_nothing_is_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FewProducts, "compare", lambda *_: (50.0, 50.5))
    assert main(["tune", "--model", "tiny", "--batch-sizes", "4"]) == 0
    assert "nothing is faster" in capsys.readouterr().out
    assert load_tuned("A GPU") == {}


OF_E4M3 = ("--quantization", "fp8", "--batch-sizes")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "tiny", "--context", "4096"], "--context 4096"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", "tiny", "--batch-sizes", "33"], "between 1 and 32"),
        (["--model", "tiny", "--batch-sizes", "65"], "between 1 and 32; more only with --dry-run"),
        (["--model", "tiny", "--batch-sizes", "129"], "between 1 and 128"),
        (["--model", "tiny", *OF_E4M3, "65"], "between 1 and 64; for e4m3 weights"),
        (["--model", "tiny", *OF_E4M3, "128", "--dry-run"], "between 1 and 64; for e4m3 weights"),
        (["--model", "tiny", "--gemms", "fc3"], "--gemms"),
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

    monkeypatch.setattr(timed_step, "Rig", refuse)
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

    def fail_at_8(rig: FewProducts, configs: dict[str, TileConfig]) -> float:
        if rig.rows == 8:
            raise error
        return step_us(rig, configs)

    monkeypatch.setattr(FewProducts, "step_us", fail_at_8)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "2,8"]) == 2
    assert says in capsys.readouterr().err
    assert {case.rows for case in load_tuned("A GPU")} == {2}


@pytest.mark.usefixtures("gpu")
def test_configs_that_fail_are_counted_and_a_model_of_another_dtype_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tma(rig: FewProducts, configs: dict[str, TileConfig]) -> float:
        if any(config.tma for config in configs.values()):
            raise RuntimeError("skinny_gemm_wgmma failed: CUDA_ERROR_INVALID_VALUE")
        return 1.0

    monkeypatch.setattr(FewProducts, "step_us", no_tma)
    tiny = describe_pretrained("tiny")
    half = replace(tiny, dtype=torch.float16)
    monkeypatch.setattr(checkpoint, "describe_pretrained", lambda path: half)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "2"]) == 0
    out, err = capsys.readouterr()
    assert "nothing is faster" in out
    assert "configs failed" in err and "CUDA_ERROR_INVALID_VALUE" in err
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

    def tokens(depth: int) -> tuple[list[list[int]], dict[str, TileConfig | None]]:
        config = config_at(depth, device="cuda", dtype="bfloat16", max_requests=4)
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            done = engine.generate(["import os", "def f(x):", "class A:"], greedy(60))
            model = engine.model.network.model
            products = FusedDecoder(model).gemms
        return [request.generated_tokens for request in done], {
            name: product.tiling(4) for name, product in products.items()
        }

    before, known = tokens(0)
    name = cuda.device_name(0)
    assert main(["tune", "--model", "tiny", "--batch-sizes", "4", "--count", "4"]) == 0
    # Whether something is faster differs; here all GEMMs get other configs.
    model = load_pretrained("tiny", device="cuda", dtype=torch.bfloat16).model
    product = FusedDecoder(model).gemms
    others = {}
    for key, each in product.items():
        shape: Any = {"tma": each.tma, "sm_count": each.sm_count}
        choices = [
            config for config in search.balanced(each.case(4), 8, **shape) if config != known[key]
        ]
        others[each.case(4)] = Entry(each.case(4), choices[0], TUNED)
    save_tuned(name, others.values())
    after, used = tokens(0)
    assert used == {key: others[each.case(4)].config for key, each in product.items()} != known
    assert tokens(1)[0] == after
    # Sums are split otherwise, so near ties may fall otherwise: not the first tokens.
    assert [some[:4] for some in after] == [some[:4] for some in before]
