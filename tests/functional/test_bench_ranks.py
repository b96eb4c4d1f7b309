"""``megatron-async bench`` over several ranks, with one rank in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.cli.main import main
from tests.support.patience import PATIENCE_SECONDS


def test_one_rank_is_measured_beside_several(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = "--shape tiny-llama --prompt-tokens 8 --new-tokens 24 --device cpu --batch-sizes 2"
    words += " --depths 1 --rounds 1 --pipeline-model-parallel-size 2 --baseline one --json"
    command = [sys.executable, "-m", "megatron_async", "bench", *words.split(), str(report)]
    said = subprocess.run(
        command, check=True, timeout=PATIENCE_SECONDS, capture_output=True, text=True
    ).stdout
    found = json.loads(report.read_text())
    assert found["ranks"] == "PP2"
    (row,) = found["results"]
    shares = row["events"]["bubble"]
    assert len(shares) == 2 and all(0 < share < 1 for share in shares)
    assert "\nbubble, batch 2, depth 1: stage 0 " in said
    (alone,) = found["baselines"]
    assert (alone["name"], alone["skipped"]) == ("one", [])
    (row,) = alone["results"]
    assert (row["engine"], row["batch"], row["depth"]) == ("one rank, depth 1", 2, 1)
    assert row["step_ms_mean"] > 0


def test_one_rank_is_no_baseline_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--baseline", "one"]) == 2
    assert "--baseline one belongs to several ranks" in capsys.readouterr().err
