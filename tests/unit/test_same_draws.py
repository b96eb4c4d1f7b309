"""Seeded draws of Hypothesis do not depend on what the process has imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.same_draws import same_draws

MODULE = "numbers_that_hypothesis_finds"


def drawn() -> list[list[int]]:
    found = []

    @seed(7)
    @settings(max_examples=40, database=None, phases=(Phase.generate,), deadline=None)
    @given(st.lists(st.integers(0, 1000), min_size=5, max_size=5))
    def note(values: list[int]) -> None:
        found.append(values)

    note()
    return found


def test_seeded_draws_are_the_same_behind_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they change: Hypothesis draws numbers that stand in the module."""
    with same_draws():
        before = drawn()
    plain = drawn()
    path = tmp_path / f"{MODULE}.py"
    path.write_text(f"NUMBERS = {list(range(300, 399))}\n")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, MODULE, importlib.util.module_from_spec(spec))
    with same_draws():
        assert drawn() == before
    assert drawn() != plain
