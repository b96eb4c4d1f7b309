"""``scripts/plan_scaling.py``: what more GPUs should give, from what was measured."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "scaling.md").read_text()
MEASURED = DOCS.partition("### More GPUs, on paper")[0].partition("Later, on two H200")[0]


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "plan_scaling.py"))


def test_the_table_of_the_docs_is_what_it_prints(plan: dict[str, Any]) -> None:
    assert plan["table"]() in DOCS


def test_what_it_starts_from_is_what_the_docs_say_was_measured(plan: dict[str, Any]) -> None:
    cells = r"^\| ([^|]+), (\d+)[^|]* \| (TP2|EP2) \| ([\d.]+) \| ([\d.]+) \|"
    shapes = {name: shape for shape, name in plan["NAMES"].items()}
    found = {
        (shapes[name], int(rows), layout): (float(alone), float(several))
        for name, rows, layout, alone, several in re.findall(cells, MEASURED, re.MULTILINE)
        if name in shapes
    }
    for layout, several in (("TP2", plan["TP2_MS"]), ("EP2", plan["EP2_MS"])):
        for (shape, count), measured in several.items():
            one = plan["ONE_GPU_MS"][shape, count]
            assert found[shape, count, layout] == (one, measured)


def test_two_gpus_take_what_was_measured(plan: dict[str, Any]) -> None:
    """Exactly where constants come from, and nearly in between."""
    for rows in (1, 128):
        row = plan["tensor"]("llama8b", 2, rows)
        assert row.step == pytest.approx(row.measured)
    between = plan["tensor"]("llama8b", 2, 32)
    assert between.step == pytest.approx(between.measured, rel=0.05)
    row = plan["experts"]("qwen3-30b-a3b", 2, 32)
    assert row.step == pytest.approx(row.measured)


def test_a_sum_takes_the_way_that_sends_less(plan: dict[str, Any]) -> None:
    sent, second = plan["sent_us"], plan["SECOND_STEP_US"]
    of_one = 1e6 * 4 * 4096 / plan["NVLINK"]
    assert sent(8, 4096) == pytest.approx(7 * of_one)
    assert sent(8, 128 * 4096) == pytest.approx(128 * 1.75 * of_one + second)
    assert sent(2, 128 * 4096) == pytest.approx(128 * of_one)
