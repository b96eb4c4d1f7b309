"""``megatron-async bench`` on a CPU, its report, its plot, and how it reads a timeline."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.inference import bench_baseline, bench_engine
from megatron_async.inference.bench_engine import Load, Subject, add_host_work, make_engine
from megatron_async.inference.bench_report import as_table
from megatron_async.inference.bench_timeline import Kernel, analyse, percentile, read_trace
from megatron_async.inference.cli import main
from megatron_async.inference.shapes import SHAPES, build_shape, floor_ms, weight_bytes
from megatron_async.models.wrapper import GPTInferenceWrapper

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
SMALL = ("--shape", "tiny-llama", "--prompt-tokens", "8", "--new-tokens", "24", "--device", "cpu")

ROW = {
    "shape": str,
    "batch": int,
    "depth": int,
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
    "speedup_over_serial": float,
    "floor_ms": type(None),
    "floor_share": type(None),
    "startup_seconds": float,
    "timeline": type(None),
}


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    options = ("--batch-sizes", "1,3", "--depths", "0,1,2", "--rounds", "2")
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
        assert 0 < row["host_ms_mean"] <= row["step_ms_mean"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms_mean"])


def test_report_says_what_was_measured_where(report: dict[str, Any]) -> None:
    assert set(report) == {
        "schema_version",
        "date",
        "command",
        "device",
        "device_name",
        "versions",
        "shape",
        "model",
        "dtype",
        "load",
        "build_seconds",
        "results",
        "baseline",
    }
    assert report["command"].startswith("megatron-async bench --shape tiny-llama --batch-sizes 1,3")
    assert (report["device"], report["dtype"], report["baseline"]) == ("cpu", "float32", None)
    assert {"megatron-async", "torch", "python"} <= set(report["versions"])
    assert report["model"] == SHAPES["tiny-llama"].to_dict()


def test_table_has_a_line_for_each_row(report: dict[str, Any]) -> None:
    lines = as_table(report).splitlines()
    assert lines[1].split()[:3] == ["batch", "depth", "ms/step"]
    assert [tuple(line.split()[:2]) for line in lines[2:8]] == [
        (str(row["batch"]), str(row["depth"])) for row in report["results"]
    ]


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
        (("--depths", "0,65"), "between 0 and 64"),
        (("--rounds", "0"), "at least 1"),
        (("--stall-us", "5"), "--stall-every"),
        (("--stall-every", "5"), "--stall-us"),
        (("--new-tokens", "10"), "no steady steps"),
        (("--shape", "gpt2", "--new-tokens", "1000"), "1024 tokens"),
        (("--json", "/nowhere/at/all.json"), "does not exist"),
        (("--model", "/nowhere"), "not a directory"),
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
def subject() -> Subject:
    config, device = SHAPES["tiny-llama"], torch.device("cpu")
    model = build_shape(config, device=device, dtype=torch.float32)
    return Subject(
        name="tiny-llama",
        config=config,
        wrapper=GPTInferenceWrapper(model),
        device=device,
        dtype=torch.float32,
        build_seconds=0.0,
    )


def test_host_work_is_spent_in_each_commit(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    spun: list[float] = []
    monkeypatch.setattr(bench_engine, "spin_us", spun.append)
    load = Load(prompt_tokens=4, new_tokens=16, host_work_us=30.0, stall_us=500.0, stall_every=4)
    engine, _ = make_engine(subject, 2, 1, load)
    with engine:
        result = bench_engine.run_round(engine, 2, load)
        assert engine.counters.steps_committed == 16
    assert spun == [30.0, 30.0, 30.0, 530.0] * 4
    assert len(result.step_ns) == len(result.host_ns) == 16 - 2 - 5


def test_engine_without_host_work_is_left_as_it_is(subject: Subject) -> None:
    load = Load(prompt_tokens=4, new_tokens=16)
    engine, _ = make_engine(subject, 1, 0, load)
    with engine:
        add_host_work(engine, load)
        assert "_commit" not in vars(engine)


def test_spinning_takes_the_time_asked_for() -> None:
    started = time.perf_counter_ns()
    bench_engine.spin_us(200)
    assert time.perf_counter_ns() - started >= 200_000


def test_all_depths_decode_the_same_prompts() -> None:
    load = Load(prompt_tokens=5, new_tokens=16, seed=3)
    first = bench_engine.prompts(100, 4, load)
    assert first == bench_engine.prompts(100, 4, load)
    assert len({tuple(prompt) for prompt in first}) == 4


# --- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch", "floor"),
    [
        ("llama8b", 32, 3.9),
        ("llama8b", 1, 3.5),
        ("qwen0.6b", 32, 0.6),
        ("qwen0.6b", 1, 0.3),
        ("gpt2", 1, 0.06),
    ],
)
def test_floor_of_known_shapes(shape: str, batch: int, floor: float) -> None:
    found = floor_ms(SHAPES[shape], 2, batch_size=batch, prompt_tokens=128, new_tokens=512)
    assert found == pytest.approx(floor, rel=0.05)


def test_weight_bytes_are_those_of_the_parameters_read(subject: Subject) -> None:
    read = sum(
        parameter.numel()
        for name, parameter in subject.wrapper.model.named_parameters()
        if "word_embeddings" not in name
    )
    assert weight_bytes(subject.config, 4) == 4 * read


def test_random_weights_are_small_but_not_zero(subject: Subject) -> None:
    for name, parameter in subject.wrapper.model.named_parameters():
        if parameter.dim() == 2:
            assert 0.005 < float(parameter.std()) < 0.05, name


# --- the baseline -----------------------------------------------------------------------------


def test_baseline_decodes_the_same_load() -> None:
    pytest.importorskip("transformers", reason="the baseline is transformers'")
    load = Load(prompt_tokens=4, new_tokens=16)
    baseline = bench_baseline.TransformersBaseline(
        SHAPES["tiny-llama"], torch.device("cpu"), torch.float32
    )
    row = baseline.measure(2, load)
    assert row["batch"] == 2 and row["steps"] == 16 - bench_baseline.SKIPPED_STEPS - 1
    assert row["step_ms_mean"] > 0


@pytest.mark.parametrize("shape", ["llama8b", "qwen0.6b", "gpt2"])
def test_baseline_has_as_many_parameters(shape: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the baseline is transformers'")
    config = SHAPES[shape]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            bench_baseline.transformers_config(config)
        )
    embedding = config.vocab_size * config.hidden_size
    learned = config.position_embedding == "learned_absolute"
    expected = weight_bytes(config, 1) + (0 if config.tie_word_embeddings else embedding)
    expected += config.max_sequence_length * config.hidden_size if learned else 0
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_missing_transformers_skips_the_baseline(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_baseline.importlib.util, "find_spec", lambda name: None)
    options = ("--rounds", "1", "--depths", "0", "--baseline", "transformers")
    assert main(["bench", *SMALL, *options]) == 0
    assert "baseline skipped: transformers is not installed" in capsys.readouterr().out


# --- timelines --------------------------------------------------------------------------------


def asynchronous_steps(count: int, gap: float) -> list[Kernel]:
    """Steps of one launch each: sample 10, publish 5, read_packet 5, two layers of 40 that pause
    for 1 before each; ``gap`` between launches. 102 a step, and the gap."""
    kernels = []
    now = 1000.0
    for launch in range(count):
        now += gap
        for name, pause, duration in (
            ("sample", 0, 10),
            ("_publish_kernel", 0, 5),
            ("_read_packet_kernel", 0, 5),
            ("gemm", 1, 40),
            ("gemm", 1, 40),
        ):
            kernels.append(Kernel(name, now + pause, now + pause + duration, launch))
            now += pause + duration
    return kernels


def test_gap_and_shares_of_asynchronous_steps() -> None:
    timeline = analyse(asynchronous_steps(6, gap=8.0))
    assert timeline is not None
    assert timeline.steps == 5
    assert timeline.step_us == pytest.approx(110)
    assert timeline.gap_us == pytest.approx(8) and timeline.gap_us_p99 == pytest.approx(8)
    assert timeline.graph_share == pytest.approx(102 / 110)
    assert timeline.kernel_share == pytest.approx(100 / 110)
    assert (timeline.kernels_per_step, timeline.launches_per_step) == (5, 1)


def test_serial_steps_add_the_gaps_of_both_launches() -> None:
    kernels = []
    for step in range(4):
        at = 100.0 * step
        kernels += [
            Kernel("_read_packet_kernel", at, at + 5, 2 * step),
            Kernel("gemm", at + 5, at + 60, 2 * step),
            Kernel("_publish_kernel", at + 63, at + 70, 2 * step + 1),
        ]
    timeline = analyse(kernels, skip=1)
    assert timeline is not None
    assert (timeline.steps, timeline.launches_per_step) == (2, 2)
    assert timeline.gap_us == pytest.approx(3 + 30)
    assert timeline.graph_share == pytest.approx(0.67)
    assert timeline.kernel_share == pytest.approx(0.67)


def test_kernels_that_overlap_are_counted_once() -> None:
    kernels = []
    for step in range(3):
        at = 50.0 * step
        kernels += [
            Kernel("read_packet", at, at + 20, step),
            Kernel("long", at + 10, at + 45, step),
            Kernel("short", at + 15, at + 20, step),
        ]
    timeline = analyse(kernels)
    assert timeline is not None
    assert timeline.kernel_share == pytest.approx(0.9)
    assert timeline.gap_us == pytest.approx(5)


def test_timeline_without_steps_or_launches_is_refused() -> None:
    assert analyse([]) is None
    assert analyse([Kernel("gemm", 0, 1, 0), Kernel("gemm", 2, 3, 1)]) is None
    assert analyse(asynchronous_steps(1, gap=1.0)) is None
    unknown = [kernel._replace(launch=-1) for kernel in asynchronous_steps(4, gap=1.0)]
    assert analyse(unknown) is None


def test_trace_gives_the_work_of_the_device_alone(tmp_path: Path) -> None:
    common = {"ph": "X", "ts": 10.5, "dur": 2.0, "args": {"correlation": 7}}
    events = [
        {"ph": "M", "name": "process_name"},
        {**common, "cat": "cuda_runtime", "name": "cudaGraphLaunch"},
        {**common, "cat": "kernel", "name": "gemm"},
        {**common, "cat": "gpu_memcpy", "name": "Memcpy DtoH"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == [
        Kernel("gemm", 10.5, 12.5, 7),
        Kernel("Memcpy DtoH", 10.5, 12.5, 7),
    ]


def test_percentile_of_few_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([5.0], 0.5) == 5.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0


# --- the plot ---------------------------------------------------------------------------------


def run_plot(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "plot_bench.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_writes_a_png(report_file: Path, tmp_path: Path) -> None:
    report = json.loads(report_file.read_text())
    for row in report["results"]:
        row["floor_ms"] = row["step_ms_mean"] / 2
    report["baseline"] = {"results": [{"batch": 1, "step_ms_mean": 1.0}]}
    given, out = tmp_path / "given.json", tmp_path / "out.png"
    given.write_text(json.dumps(report))
    run = run_plot(str(given), "-o", str(out))
    assert (run.returncode, run.stderr) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_of_something_else_is_one_line(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text("{}")
    run = run_plot(str(given), "-o", str(tmp_path / "out.png"))
    assert run.returncode == 2 and run.stderr.count("\n") == 1


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_sees_one_launch_a_step_at_depth_1(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--shape", "tiny-llama", "--dtype", "float32", "--new-tokens", "64")
    assert main(["bench", *options, "--depths", "0,1", "--rounds", "1", "--json", str(path)]) == 0
    serial, asynchronous = (row["timeline"] for row in json.loads(path.read_text())["results"])
    assert serial["launches_per_step"] == pytest.approx(2, abs=0.1)
    assert asynchronous["launches_per_step"] == pytest.approx(1, abs=0.1)
    assert 0 < asynchronous["kernel_share"] <= asynchronous["graph_share"] <= 1
