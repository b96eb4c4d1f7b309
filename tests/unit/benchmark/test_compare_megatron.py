"""``scripts/compare_megatron.py``: what it makes of two engines' tokens and times."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "compare_megatron.py"), run_name="compare"
)
Parting, Run = SCRIPT["Parting"], SCRIPT["Run"]


def test_engines_part_at_the_first_difference_of_each_prompt() -> None:
    one, other = [[1, 2, 3, 4], [5, 6], [7]], [[1, 9, 3, 8], [5, 6], [8]]
    found = SCRIPT["partings"](one, other)
    assert found == [Parting(0, 1, (2, 9)), Parting(2, 0, (7, 8))]
    with pytest.raises(ValueError, match="another number of tokens"):
        SCRIPT["partings"]([[1]], [[1, 2]])


def test_partings_beyond_a_tie_are_told_from_near_ones() -> None:
    found = [Parting(0, 1, (2, 9)), Parting(2, 0, (7, 8)), Parting(3, 0, (7, 8))]
    gaps = {0: 0.09, 2: 0.11, 3: float("nan")}
    bad = SCRIPT["beyond_ties"](found, lambda parting: gaps[parting.prompt], 0.1)
    assert [parting.prompt for parting, _ in bad] == [2, 3]


def test_the_table_has_a_line_for_each_batch_and_a_column_for_each_engine() -> None:
    rows = [
        {"shape": "8b", "batch": batch, "engine": engine, "ms": ms}
        for batch, engine, ms in ((1, "theirs", 2.0), (1, "ours", 1.0), (32, "ours", 4.126))
    ]
    assert SCRIPT["table"](rows).splitlines() == [
        "| shape | batch | theirs | ours |",
        "|---|---|---|---|",
        "| 8b | 1 | 2.00 | 1.00 |",
        "| 8b | 32 |  | 4.13 |",
    ]


def test_a_step_is_the_median_behind_the_first_ones() -> None:
    steps = [1.0] * SCRIPT["WARM_UP_STEPS"] + [0.002, 0.004, 0.003]
    assert Run("x", [], steps).milliseconds == pytest.approx(3)
    assert Run("x", [], [0.005]).milliseconds == pytest.approx(5)


def test_our_engine_alone_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    argv = ["--shape", "tiny", "--batch", "2", "--prompt-tokens", "9", "--new-tokens", "12"]
    assert SCRIPT["main"]([*argv, "--ours-alone", "--json", str(rows)]) == 0
    found = json.loads(rows.read_text())
    assert [row["engine"] for row in found] == ["ours, depth 0", "ours, depth 1"]
    assert all(row["partings"] == 0 and row["ms"] > 0 and row["steps"] > 5 for row in found)
    assert "| tiny | 2 |" in capsys.readouterr().out
