"""The ragged workload of ``bench``."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_async.benchmark import ragged_workload, workloads
from megatron_async.benchmark.measuring.loads import (
    RaggedLoad,
    Range,
    arrivals,
    log_normal,
    ranges_within,
    with_stops,
)
from megatron_async.benchmark.report import as_table
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine

Capture = pytest.CaptureFixture[str]
LOAD = RaggedLoad(requests=30, max_requests=4, prompt_range=(4, 32), output_range=(4, 16))
SMALL = (
    *("--workload", "ragged", "--requests", "12", "--max-requests", "4", "--device", "cpu"),
    *("--prompt-range", "4,32", "--output-range", "4,16", "--shape", "tiny-llama"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ragged") / "report.json"
    options = ("--depths", "0,1,2,4", "--arrival-rate", "inf,200", "--events", "--json", str(path))
    assert main(["bench", *SMALL, *options]) == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize(
    ("most", "given", "prompt", "output"),
    [
        (3072, {}, (32, 2048), (16, 1024)),
        (3071, {}, (32, 2047), (16, 1024)),
        (512, {}, (32, 341), (16, 171)),
        (30, {}, (20, 20), (10, 10)),
        (1024, {"prompt_range": (8, 1000)}, (8, 1000), (16, 24)),
        (2048, {"prompt_range": (8, 1000)}, (8, 1000), (16, 1024)),
        (1024, {"output_range": (4, 1014)}, (10, 10), (4, 1014)),
        (1024, {"output_range": (4, 2000)}, (32, 2048), (4, 2000)),
        (9, {"prompt_range": (5, 6), "output_range": (5, 6)}, (5, 6), (5, 6)),
    ],
)
def test_ranges_that_are_not_given_fit_the_model(
    most: int, given: dict[str, Range], prompt: Range, output: Range
) -> None:
    """What cannot fit is left to the error, and so is what is given."""
    assert ranges_within(most, given) == {"prompt_range": prompt, "output_range": output}


@pytest.mark.parametrize(
    ("options", "prompt", "output"),
    [((), [32, 1365], [16, 683]), (("--output-range", "1,3"), [32, 2045], [1, 3])],
)
def test_the_default_model_serves_the_default_load(
    options: tuple[str, ...], prompt: list[int], output: list[int], tmp_path: Path, capsys: Capture
) -> None:
    """Its longest sequence is shorter than the load is by default, which one line says."""
    path = tmp_path / "report.json"
    few = ("--requests", "2", "--max-requests", "2", "--depths", "1", "--device", "cpu")
    assert main(["bench", "--workload", "ragged", *few, *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["complete"] and report["shape"] == "tiny"
    assert report["load"]["prompt_range"] == prompt and report["load"]["output_range"] == output
    ranges = [
        f"--{name}-range {low},{high}"
        for name, (low, high) in (("prompt", prompt), ("output", output))
    ]
    lines = [line for line in capsys.readouterr().err.splitlines() if "longest request" in line]
    assert len(lines) == 1 and lines[0].endswith(f"has 2048 tokens here: {' '.join(ranges)}")
    assert all(each in report["command"] for each in ranges)


def test_all_depths_generate_the_same_tokens(report: dict[str, Any]) -> None:
    rows = report["results"]
    assert [(row["depth"], row["arrival_rate"]) for row in rows] == [
        (depth, rate) for depth in (0, 1, 2, 4) for rate in ("inf", "200")
    ]
    assert {row["requests_different"] for row in rows} == {0}
    assert len({row["output_tokens"] for row in rows}) == 1


def test_a_third_of_the_requests_stop_at_a_token(report: dict[str, Any]) -> None:
    for row in report["results"]:
        assert row["stopped"] == 4
        # The chain ran over each of these ends, and over no other.
        assert (row["tokens_discarded"] > 0) is (row["depth"] > 0)


def test_rows_have_what_was_measured(report: dict[str, Any]) -> None:
    for row in report["results"]:
        assert row["steps"] == row["steps_mixed"] + row["steps_decode"]
        assert row["steps_mixed"] > 1 and row["steps_decode"] > 1
        assert 1 <= row["rows_mean"] <= 4
        assert 0 < row["output_tokens_per_second"] < row["tokens_per_second"]
        for name in ("first_token_ms", "token_ms_request_mean", "token_ms_between"):
            assert 0 < row[f"{name}_p50"] <= row[f"{name}_p99"]
        assert row["evictions"] == 0 and row["timeline"] is None
        assert 0 < row["events"]["inside_share"] <= 1
        assert row["speedup_over_serial"] > 0
        (host,) = row["host_conditions"]
        assert min(host["reference_us"]) > 0


def test_table_has_a_line_for_each_row(report: dict[str, Any]) -> None:
    lines = as_table(report).splitlines()
    assert "ragged: 12 requests, at most 4 at once" in lines[0]
    assert [line.split()[:2] for line in lines[2:4]] == [["at-once", "0"], ["200/s", "0"]]
    assert "--arrival-rate inf,200" in report["command"]
    assert any(line.startswith("host: reference work ") for line in lines)


def test_a_small_cache_evicts(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    # Each needs three blocks in the end, and there are three.
    options = ("--requests", "4", "--output-range", "130,150", "--block-count", "3")
    assert main(["bench", *SMALL, *options, "--depths", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["results"]
    assert row["block_count"] == 3 and row["evictions"] > 0


def test_a_depth_that_fails_leaves_the_others(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ragged_workload.start_engine

    def fail_at_2(model: Any, config: Any, *others: Any) -> Any:
        if config.depth == 2:
            raise RuntimeError("CUDA error: out of memory")
        return start(model, config, *others)

    monkeypatch.setattr(ragged_workload, "start_engine", fail_at_2)
    assert main(["bench", *SMALL, "--depths", "0,2,1"]) == 1
    captured = capsys.readouterr()
    assert "error: depth 2: out of memory; lower --max-requests" in captured.err
    assert "failed: depth 2: out of memory" in captured.out
    assert [line.split()[:2] for line in captured.out.splitlines()[2:5]] == [
        ["at-once", "0"],
        ["-", "2"],
        ["at-once", "1"],
    ]


def test_a_run_that_is_cut_off_shows_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = workloads.run_load
    runs: list[Any] = []

    def run_until_cut_off(*args: Any, **kwargs: Any) -> Any:
        if len(runs) == 3:  # those for end tokens and to warm up, and the first rate
            signal.raise_signal(signal.SIGTERM)
        runs.append(run(*args, **kwargs))
        return runs[-1]

    for module in (workloads, ragged_workload):
        monkeypatch.setattr(module, "run_load", run_until_cut_off)
    path = tmp_path / "report.json"
    options = ("--depths", "0,1", "--arrival-rate", "inf,200", "--json", str(path))
    assert main(["bench", *SMALL, *options]) == 130
    (row,) = json.loads(path.read_text())["results"]
    assert (row["depth"], row["speedup_over_serial"]) == (0, 1.0)


# --- the load ---------------------------------------------------------------------------------


def test_requests_are_those_of_the_seed() -> None:
    requests = LOAD.make_requests(512)
    assert requests == LOAD.make_requests(512)
    lengths = [len(request.prompt) for request in requests]
    assert min(lengths) >= 4 and max(lengths) <= 32 and len(set(lengths)) > 5


def test_lengths_are_log_normal_and_clipped() -> None:
    source = random.Random(0)
    lengths = sorted(log_normal(source, 32, 2048) for _ in range(4001))
    assert lengths[0] == 32 and lengths[-1] == 2048
    assert lengths[2000] == pytest.approx(256, rel=0.1)  # the geometric mean
    assert 0.02 < sum(length == 32 for length in lengths) / 4001 < 0.03


def test_stops_occur_first_where_the_request_then_ends() -> None:
    requests = LOAD.make_requests(512)
    streams = [[7, 7, 8, 9, 7, 9, 3][: 1 + n % 7] for n in range(len(requests))]
    stopping = with_stops(requests, streams, seed=1)
    for number, (request, stream) in enumerate(zip(stopping, streams, strict=True)):
        stop = request.params.termination_id
        assert (stop != -1) is (number % 3 == 1 and len(stream) > 1)
        assert stop in (-1, *stream[:-1])
        assert request.prompt == requests[number].prompt


def test_what_stopping_requests_generate_does_not_hang_on_logits() -> None:
    """So that an end token that occurred once occurs again, whatever 16 bits make of the rest."""
    params = dataclasses.replace(LOAD.make_requests(512)[1].params, num_tokens_to_generate=40)
    engine = DynamicInferenceEngine.from_pretrained("tiny")
    prompts = ["import os", "class Cou"]
    first, second = (request.generated_tokens for request in engine.generate(prompts, params))
    assert first == second and len(set(first)) > 1
    cooler = dataclasses.replace(params, temperature=10)
    first, second = (request.generated_tokens for request in engine.generate(prompts, cooler))
    assert first != second


def test_arrivals_are_poisson_or_all_at_once() -> None:
    assert arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]
    times = arrivals(20, 4000, seed=0)
    assert times == sorted(times) == arrivals(20, 4000, seed=0)
    assert times[-1] == pytest.approx(200, rel=0.1)
