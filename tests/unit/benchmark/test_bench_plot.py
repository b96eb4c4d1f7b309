"""``scripts/plot_bench.py``."""

from __future__ import annotations

import copy
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[3] / "scripts" / "plot_bench.py"
LOAD = {"host_work_us": 0.0, "stall_us": 0.0}
COMMON = {
    "device_name": "a GPU",
    "dtype": "bfloat16",
    "date": "2026-11-20T00:00:00",
    "shape": "llama8b",
    "load": LOAD,
}
DECODE: dict[str, Any] = {
    **COMMON,
    "workload": "decode",
    "results": [
        {"batch": 32, "depth": 0, "step_ms_mean": 5.5, "floor_ms": 3.9},
        {"batch": 32, "depth": 1, "step_ms_mean": 5.4, "floor_ms": 3.9},
        {"batch": 64, "depth": 0, "error": "out of memory"},
    ],
    "baselines": [
        {
            "name": "transformers-cb",
            "results": [
                {"engine": "x continuous batching, asynchronous", "batch": 32, "step_ms_mean": 9.0}
            ],
        }
    ],
}
RAGGED: dict[str, Any] = {
    **COMMON,
    "workload": "ragged",
    "results": [
        {"arrival_rate": rate, "depth": depth, "output_tokens_per_second": 5000.0 + depth}
        for depth in (0, 1)
        for rate in ("inf", "20")
    ],
    "baselines": [
        {"name": "transformers-cb", "results": [{"engine": "x", "tokens_per_second": 90.0}]}
    ],
}


def test_panels_show_depths_baselines_and_others() -> None:
    script = runpy.run_path(str(SCRIPT))
    others = [script["other"]("llama8b:32:vLLM=5.49"), script["other"]("gpt2:1:x=1")]
    (panel,) = script["panels_of"](DECODE, others)
    assert (panel.title, panel.floor) == ("llama8b, batch 32", 3.9)
    assert [(bar.name, bar.height) for bar in panel.bars] == [
        ("depth 0", 5.5),
        ("depth 1", 5.4),
        ("transformers cb async", 9.0),
        ("vLLM", 5.49),
    ]


def test_panels_name_long_prompts() -> None:
    panels_of = runpy.run_path(str(SCRIPT))["panels_of"]
    for tokens, title in ((128, "llama8b, batch 32"), (4096, "llama8b, batch 32, prompt 4,096")):
        (panel,) = panels_of({**DECODE, "load": {**LOAD, "prompt_tokens": tokens}}, [])
        assert panel.title == title


def test_ragged_panels_are_by_arrival_rate() -> None:
    at_once, over_time = runpy.run_path(str(SCRIPT))["panels_of"](RAGGED, [])
    assert at_once.title == "llama8b, ragged, at once" and over_time.title.endswith("20/s")
    assert [bar.height for bar in at_once.bars] == [5000.0, 5001.0, 90.0]
    assert len(over_time.bars) == 2 and over_time.floor is None


def run_plot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_several_files_make_one_png(tmp_path: Path) -> None:
    slowed = copy.deepcopy(DECODE)
    slowed["load"]["host_work_us"] = 4000.0
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for file, report in zip(files, (DECODE, RAGGED, slowed), strict=True):
        file.write_text(json.dumps(report))
    out = tmp_path / "out.png"
    run = run_plot(*map(str, files), "-o", str(out), "--other", "llama8b:32:vLLM=5.49")
    assert (run.returncode, run.stderr) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_no_panel_shows_is_one_line(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text(json.dumps(DECODE))
    out = tmp_path / "out.png"
    run = run_plot(str(given), "-o", str(out), "--other", "llama8b:9:vLLM=5.49")
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and not out.exists()
    assert "--other llama8b:9:vLLM: there is no such panel" in run.stderr
    assert "llama8b, batch 32" in run.stderr


WITHOUT_HEIGHT = copy.deepcopy(DECODE)
WITHOUT_HEIGHT["results"][0]["step_ms_mean"] = None


@pytest.mark.parametrize("text", ["{}", "[]", "nothing", json.dumps(WITHOUT_HEIGHT)])
def test_plot_of_something_else_is_one_line(tmp_path: Path, text: str) -> None:
    given = tmp_path / "given.json"
    given.write_text(text)
    run = run_plot(str(given), "-o", str(tmp_path / "out.png"))
    assert run.returncode == 2 and run.stderr.count("\n") == 1
