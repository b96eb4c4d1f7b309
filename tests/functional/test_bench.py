"""``megatron-async bench`` on a CPU: steps in which all rows decode, and what is reported."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.benchmark import decode_workload, runner
from megatron_async.benchmark.measuring import engines, loads
from megatron_async.benchmark.measuring.engines import make_engine
from megatron_async.benchmark.measuring.loads import Load
from megatron_async.benchmark.measuring.runs import run_load, steady_steps
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.benchmark.report import as_table
from megatron_async.cli.main import main
from megatron_async.errors import CacheTooLargeError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.memory_traffic import floor_ms
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.gpt_network import GPTNetwork

Capture = pytest.CaptureFixture[str]
SMALL = ("--shape", "tiny-llama", "--prompt-tokens", "8", "--new-tokens", "24", "--device", "cpu")

ROW = {
    "shape": str,
    "batch": int,
    "depth": int,
    "window": int,
    "tokens_per_step": float,
    "acceptance_by_position": list,
    "tokens_drafted": int,
    "tokens_accepted": int,
    "step_ratio": float,
    "speedup_over_plain": float,
    "rounds": int,
    "steps": int,
    "step_ms_mean": float,
    "step_ms_p50": float,
    "step_ms_p99": float,
    "round_step_ms": list,
    "tokens_per_second": float,
    "host_ms_mean": float,
    "host_ms_p50": float,
    "host_ms_p99": float,
    "round_host_ms": list,
    "speedup_over_serial": float,
    "experts_read": type(None),
    "floor_ms": type(None),
    "floor_share": type(None),
    "startup_seconds": float,
    "capture_seconds": float,
    "graphs": int,
    "step_summary": dict,
    "events": dict,
    "timeline": type(None),
    "host_conditions": list,
}


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    options = ("--batch-sizes", "1,3", "--depths", "0,1,2", "--rounds", "2", "--events")
    assert main(["bench", *SMALL, *options, "--json", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def report(report_file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(report_file.read_text())
    return loaded


def test_report_has_a_row_for_each_batch_and_depth(report: dict[str, Any]) -> None:
    assert [(row["batch"], row["depth"]) for row in report["results"]] == [
        (batch, depth) for batch in (1, 3) for depth in (0, 1, 2)
    ]
    for row in report["results"]:
        assert {name: type(value) for name, value in row.items()} == ROW
        # 24 tokens, less those that fill and drain the chain, in each of two rounds.
        assert row["steps"] == 2 * (24 - 2 * row["depth"] - 5)
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        # 24 tokens after the prefill, whose logits the first sampling takes.
        assert row["events"]["launches"] == (47 if row["depth"] == 0 else 24)
        assert 0 < row["events"]["inside_share"] <= 1 and not row["events"]["in_timed_round"]
        assert 0 < row["host_ms_mean"] <= row["step_ms_mean"]
        assert len(row["host_conditions"]) == 2
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms_mean"])


def test_report_says_what_was_measured_where(report: dict[str, Any]) -> None:
    assert set(report) == {
        "schema_version",
        "date",
        "command",
        "device",
        "device_name",
        "bandwidth_bytes_per_second",
        "versions",
        "workload",
        "shape",
        "model",
        "dtype",
        "kv_cache_dtype",
        "load",
        "drafts",
        "build_seconds",
        "fused_decode_off",
        "decode_coverage",
        "startup",
        "results",
        "baselines",
        "complete",
    }
    assert report["command"].startswith(
        "megatron-async bench --shape tiny-llama --device cpu --batch-sizes 1,3 "
    )
    assert (report["device"], report["dtype"], report["baselines"]) == ("cpu", "float32", [])
    assert report["complete"]
    assert {"megatron-async", "torch", "python"} <= set(report["versions"])
    assert report["model"] == SHAPES["tiny-llama"].to_dict()


def test_table_has_a_line_for_each_row(report: dict[str, Any]) -> None:
    lines = as_table(report).splitlines()
    assert lines[1].split()[:3] == ["batch", "depth", "ms/step"]
    assert [tuple(line.split()[:2]) for line in lines[2:8]] == [
        (str(row["batch"]), str(row["depth"])) for row in report["results"]
    ]
    assert lines[9].startswith("host: reference work ")


def test_json_on_stdout_stands_alone(capsys: Capture) -> None:
    assert main(["bench", *SMALL, "--depths", "1", "--rounds", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["results"]
    assert row["speedup_over_serial"] is None
    assert "ms/step" in captured.err


def test_embedded_model_is_measured_by_default(capsys: Capture) -> None:
    options = ("--prompt-tokens", "8", "--new-tokens", "16", "--rounds", "1", "--device", "cpu")
    assert main(["bench", *options]) == 0
    assert capsys.readouterr().out.startswith("tiny, ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shape", "llama9b"), "invalid choice"),
        (("--shape", "gpt2", "--model", "tiny"), "not allowed with"),
        (("--batch-sizes", "1,none"), "must be an integer"),
        (("--batch-sizes", "1,65537"), "argument --batch-sizes: '65537' must be an integer"),
        (("--depths", "0,65"), "between 0 and 64"),
        (("--rounds", "0"), "at least 1"),
        (("--stall-us", "5"), "--stall-every"),
        (("--stall-every", "5"), "--stall-us"),
        (("--new-tokens", "10"), "no steady steps"),
        (("--shape", "gpt2", "--new-tokens", "1000"), "1024 tokens"),
        (("--json", "/nowhere/at/all.json"), "/nowhere/at/all.json: cannot be written"),
        (("--json", "/"), "--json /: cannot be written: Is a directory"),
        (("--json", "/proc/all.json"), "/proc/all.json: cannot be written"),
        (("--model", "/nowhere"), "not a directory"),
        (("--requests", "5"), "--requests belongs to --workload ragged"),
        (("--workload", "ragged", "--batch-sizes", "1"), "belongs to --workload decode"),
        (("--workload", "ragged", "--temperature", "1"), "belongs to --workload decode"),
        (("--top-k", "5"), "give a --temperature above 0"),
        (("--temperature", "1", "--baseline", "transformers"), "--baseline decodes greedily"),
        (("--workload", "ragged", "--all-buckets"), "ragged captures all"),
        (("--workload", "ragged", "--prompt-range", "5,4"), "LOW,HIGH"),
        (("--workload", "ragged", "--arrival-rate", "inf,0"), "above 0"),
        (
            ("--workload", "ragged", "--shape", "gpt2", "--prompt-range", "32,2048"),
            "--prompt-range 32,2048 and --output-range 16,1024 make sequences of 3072 tokens",
        ),
        (("--baseline", "transformers,vllm"), "must be among"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    try:
        status = main(["bench", "--device", "cpu", *options])
    except SystemExit as left:
        status = int(left.code or 0)
    captured = capsys.readouterr()
    assert status == 2 and not captured.out
    assert message in captured.err and captured.err.count("\n") == 1


# --- work added to the host -------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> BenchmarkModel:
    config, device = SHAPES["tiny-llama"], torch.device("cpu")
    built = build_random_model(config, device=device, dtype=torch.float32)
    return BenchmarkModel(
        name="tiny-llama",
        config=config,
        network=GPTNetwork(built),
        device=device,
        dtype=torch.float32,
        build_seconds=0.0,
    )


def test_host_work_is_spent_in_each_commit(
    model: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spun: list[float] = []
    monkeypatch.setattr(loads, "spin_us", spun.append)
    load = Load(prompt_tokens=4, new_tokens=16, host_work_us=30.0, stall_us=500.0, stall_every=4)
    with make_engine(model, 2, 1, load).engine as engine:
        run = run_load(engine, load.requests(512, 2))
        assert engine.counters.steps_committed == 16
    assert spun == [30.0, 30.0, 30.0, 530.0] * 4
    steps = steady_steps(run, 2, 1)
    assert len(steps.step_ms) == len(steps.host_ms) == 16 - 2 - 5
    assert set(steps.tokens) == {2}


def test_steady_steps_of_several_micro_batches_bring_a_token_of_each_row(
    model: BenchmarkModel,
) -> None:
    load = Load(prompt_tokens=4, new_tokens=16)
    parts = dataclasses.replace(model, micro_batches=2)
    with make_engine(parts, 3, 1, load).engine as engine:
        run = run_load(engine, load.requests(512, 3))
    assert {step.rows for step in run.steps} >= {1, 2} and run.micro_batches == 2
    steps = steady_steps(run, 3, 1)
    assert len(steps.step_ms) > 16 and set(steps.tokens) == {3}


def test_engine_without_host_work_is_left_as_it_is(model: BenchmarkModel) -> None:
    load = Load(prompt_tokens=4, new_tokens=16)
    with make_engine(model, 1, 0, load).engine as engine:
        before = dict(vars(engine))
        load.add_to(engine)
        assert vars(engine) == before


def test_spinning_takes_the_time_asked_for() -> None:
    started = time.perf_counter_ns()
    loads.spin_us(200)
    assert time.perf_counter_ns() - started >= 200_000


def test_all_depths_decode_the_same_prompts() -> None:
    load = Load(prompt_tokens=5, new_tokens=16, seed=3)
    first = load.requests(100, 4)
    assert first == load.requests(100, 4)
    assert len({tuple(request.prompt) for request in first}) == 4


def test_requests_are_sampled_as_asked(capsys: Capture) -> None:
    load = Load(prompt_tokens=4, new_tokens=16, temperature=0.6, top_k=20, top_p=0.9)
    asked = [request.params for request in load.requests(512, 2)]
    assert {(params.temperature, params.top_k, params.top_p) for params in asked} == {
        (0.6, 20, 0.9)
    }
    shape = ("--device", "cpu", "--shape", "tiny-llama", "--new-tokens", "16", "--depths", "1")
    sampling = ("--temperature", "0.6", "--top-k", "20", "--top-p", "0.9")
    assert main(["bench", *shape, "--rounds", "1", *sampling]) == 0
    assert "16 new tokens, temperature 0.6, top-k 20, top-p 0.9\n" in capsys.readouterr().out


# --- failures ---------------------------------------------------------------------------------


def test_a_failed_batch_is_marked_and_the_others_are_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = decode_workload.make_engine

    def make_small(model: BenchmarkModel, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if batch_size == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        if batch_size == 3:
            raise ZeroDivisionError("broken")
        if batch_size == 4:
            raise CacheTooLargeError("device cpu has 1.0 GiB")
        return make(model, batch_size, *args, **kwargs)

    monkeypatch.setattr(decode_workload, "make_engine", make_small)
    path = tmp_path / "report.json"
    options = ("--batch-sizes", "2,3,4,1", "--depths", "0", "--rounds", "1", "--json", str(path))
    assert main(["bench", *SMALL, *options]) == 1
    captured = capsys.readouterr()
    report = json.loads(path.read_text())
    memory, broken, too_large, good = report["results"]
    for row in (memory, too_large):
        assert row["error"].startswith("out of memory; lower --batch-sizes")
    assert broken["error"] == "ZeroDivisionError: broken"
    assert good["step_ms_mean"] > 0 and not report["complete"]
    assert "error: batch 2, depth 0: out of memory" in captured.err
    assert "Traceback" in captured.err and "in make_small" in captured.err
    assert "failed: batch 3, depth 0: ZeroDivisionError: broken" in captured.out
    assert captured.out.splitlines()[2].split()[:3] == ["2", "0", "failed"]


def test_a_batch_that_never_decodes_together_leaves_the_others(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "MOST_PREFILL_TOKENS", 8)  # of one prompt
    path = tmp_path / "report.json"
    options = ("--batch-sizes", "2,30,1", "--depths", "0", "--rounds", "1", "--new-tokens", "14")
    assert main(["bench", *SMALL, *options, "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["results"]
    assert [(row["batch"], row.get("error")) for row in rows] == [
        (2, None),
        (30, "no step decoded all rows together; raise --new-tokens"),
        (1, None),
    ]
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_that_is_cut_off_shows_what_it_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = decode_workload.make_engine

    def make_until_cut_off(
        model: BenchmarkModel, batch_size: int, depth: int, *args: Any, **kwargs: Any
    ) -> Any:
        if (batch_size, depth) == (2, 1):
            signal.raise_signal(signal.SIGTERM)
        return make(model, batch_size, depth, *args, **kwargs)

    monkeypatch.setattr(decode_workload, "make_engine", make_until_cut_off)
    path = tmp_path / "report.json"
    options = ("--batch-sizes", "1,2", "--depths", "0,1", "--rounds", "1", "--json", str(path))
    assert main(["bench", *SMALL, *options]) == 130
    rows = json.loads(path.read_text())["results"]
    assert [(row["batch"], row["depth"]) for row in rows] == [(1, 0), (1, 1), (2, 0)]
    assert all(row["speedup_over_serial"] for row in rows)
    assert "ms/step" in capsys.readouterr().out


# --- the start --------------------------------------------------------------------------------


def test_phases_of_two_starts_are_timed(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "report.json"
    options = ("--depths", "1", "--rounds", "1", "--startup", "--all-buckets")
    assert main(["bench", *SMALL, *options, "--batch-sizes", "9", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    startup = report["startup"]
    assert list(startup["phases"]) == ["model", "cache", "capture", "rest", "first token"]
    assert all(len(values) == 2 and min(values) >= 0 for values in startup["phases"].values())
    # Rows are padded to 8 and 16 on a CPU: two buckets of four graphs each, and C.
    assert startup["graphs"] == report["results"][0]["graphs"] == 15
    assert "first token" in capsys.readouterr().out


def test_model_is_gone_before_the_baseline_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    models: list[Any] = []
    load = runner.load_benchmark_model

    def remember(*args: Any, **kwargs: Any) -> BenchmarkModel:
        found = load(*args, **kwargs)
        models.append(weakref.ref(found.network.model))
        return found

    def check(*_: Any) -> None:
        gc.collect()
        assert [model() for model in models] == [None, None]

    monkeypatch.setattr(runner, "load_benchmark_model", remember)
    monkeypatch.setattr(runner, "measure_baselines", check)
    options = ("--depths", "0,1", "--rounds", "1", "--startup", "--baseline", "transformers")
    assert main(["bench", *SMALL, *options]) == 0


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_sees_one_launch_a_step_at_depth_1(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--shape", "tiny-llama", "--dtype", "float32", "--new-tokens", "64")
    assert main(["bench", *options, "--depths", "0,1", "--rounds", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    serial, asynchronous = (row["timeline"] for row in report["results"])
    assert serial["launches_per_step"] == pytest.approx(2, abs=0.1)
    assert asynchronous["launches_per_step"] == pytest.approx(1, abs=0.1)
    assert 0 < asynchronous["kernel_share"] <= asynchronous["graph_share"] <= 1
    speed = report["bandwidth_bytes_per_second"]
    load = {"batch_size": 1, "prompt_tokens": 128, "new_tokens": 64}
    floor = floor_ms(SHAPES["tiny-llama"], 4, speed, **load)
    assert [row["floor_ms"] for row in report["results"]] == [floor, floor]
