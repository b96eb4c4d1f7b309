"""Which slices of a trainer's ranks go where in those of an engine of another layout, compared with
megatron-core's own sharding (``tests/support/megatron_layouts.py``); no rank reads more than its
own bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
LAYOUTS = [
    "dense:4,1,1,4>2,1,1",  # more tensor-parallel ranks than query groups
    "dense:2,1,1,2>1,1,1",
    "dense:1,1,1,1>2,1,1",
    "dense:2,2,1,2>2,1,1",
    "dense:2,1,1,2>1,2,1",
    "dense:1,2,1,1>2,2,1",
    "padded:4,1,1,4>2,1,1",
    "tied:1,2,1,1>2,1,1",
    "tied:2,1,1,2>1,2,1",
    "tied:1,2,1,1>1,2,1",
    "mtp:2,2,1,2>1,1,1",
    "mtp:1,1,1,1>2,1,1",
    "experts:2,1,1,2>1,1,2",
    "experts:1,1,2,1>2,1,1",
    "experts:2,1,2,1>2,1,1",
    "experts:2,1,2,2>1,1,2",
    "experts:1,2,2,1>2,1,2",
    "latents:2,1,1,2>1,1,1",
    "latents:1,1,1,1>2,1,1",
]
"""Tensor, pipeline, expert and expert-tensor sizes of the trainer, and the first three of the
engine."""
MUTANTS = {
    "off_by_one!dense:2,1,1,2>1,1,1": "linear_fc1.weight of rank 0",
    "off_by_one_in_the_target!dense:2,1,1,2>1,1,1": "not once",
    "swapped_experts!experts:1,1,2,1>2,1,1": "experts.linear_fc1.weight of rank 0",
    "joined_halves!dense:2,1,1,2>1,1,1": "linear_fc1.weight of rank 0",
    "joined_halves!experts:2,1,1,2>1,1,2": "experts.linear_fc1.weight of rank 0",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("plans") / "found.json"
    module = "tests.support.megatron_layouts"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(file), *LAYOUTS, *MUTANTS],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", LAYOUTS)
def test_each_rank_takes_what_megatron_core_gives_it_and_no_more(case: str, found: Any) -> None:
    """Each element of its parameters once; and it reads as many bytes as these have."""
    ranks = found[case]
    assert isinstance(ranks, list), ranks
    tensor, pipeline, expert = map(int, case.partition(">")[2].split(","))
    assert len(ranks) == pipeline * max(tensor, expert)
    assert all(rank["taken"] == rank["own"] > 0 for rank in ranks)


@pytest.mark.parametrize("case", MUTANTS)
def test_wrong_plans_are_seen(case: str, found: Any) -> None:
    assert isinstance(found[case], str), "nobody has seen it"
    assert MUTANTS[case] in found[case]
