"""A steady decode step, and the whole life of a request, cross few functions and files: whoever
reads the loop can follow them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "count_step_functions.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("count_step_functions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("depth", (0, 1, 2))
@pytest.mark.parametrize("requests", (1, 5))
def test_a_steady_step_crosses_at_most_13_files_and_40_functions(
    script: Any, requests: int, depth: int
) -> None:
    for functions in script.steady_steps(requests, depth):
        assert len({file for file, _ in functions}) <= 13
        assert len(functions) <= 40
        # The counter sees both ends of the step.
        names = {function for _, function in functions}
        assert {"DecodeLoop.step", "Scheduler.commit", "ModelRunner.launch"} <= names


@pytest.mark.parametrize("depth", (0, 1))
def test_a_request_crosses_few_files_and_functions(script: Any, depth: int) -> None:
    """On the host's thread: one greedy request of token ids for eight tokens, from ``add_request``
    to the finished future, in an engine that has served another one. Each function counts once;
    comprehensions are part of theirs."""
    added, life = script.life_of_a_request(depth)
    assert len(script.files_of(added)) <= 11 and len(added) <= 40
    assert len(script.files_of(life)) <= 30 and len(life) <= 150
    names = {function for _, function in life}
    assert {"RequestQueue.add", "ModelRunner.launch", "OutputProcessor.resolve_futures"} <= names
