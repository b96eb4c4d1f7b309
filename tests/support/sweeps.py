"""Tests of many cases of one kind, of which each run takes a share.

``@pytest.mark.sweep`` takes one of :data:`CASES` cases of a test function, or of as many as its
``of`` says, and ``@pytest.mark.sweep("fault")`` as many of each value of its parameter ``fault``,
but at least one.
Which ones depends on the commit alone, so that a run can be repeated, and other commits mostly take
others. ``--all`` takes every case.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

CASES = 8
SEED = "TEST_SWEEP_SEED"
"""Environment variable: what is chosen by in place of the commit."""

ALL = "TEST_SWEEP_ALL"
"""The same, of ``--all``."""

T = TypeVar("T")
_ROOT = Path(__file__).parents[2]


def choose_seed(*, everything: bool = False) -> None:
    """Once for all processes of a run, which takes ``everything`` or a share."""
    if everything:
        os.environ[ALL] = "1"
    if SEED not in os.environ:
        command = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:  # no git
            commit = ""
        os.environ[SEED] = commit.strip()


def some(values: Sequence[T], count: int) -> list[T]:
    """``count`` of them, by the commit, in their order; all with ``--all``."""
    if ALL in os.environ:
        return list(values)
    order = sorted(range(len(values)), key=lambda place: number_of(repr(values[place])))
    return [values[place] for place in sorted(order[:count])]


def drawn(values: Sequence[T]) -> T:
    """One of them, by the commit."""
    return values[number_of("") % len(values)]


def share(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What a run takes of these tests, in their order, and what it leaves out."""
    groups: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    cases: dict[tuple[object, ...], int] = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is not None and not is_skipped(item):
            group = _group(item, mark.args)
            groups[group].append(item)
            cases[group] = mark.kwargs.get("of", CASES)
    left = {item for name, group in groups.items() for item in _left_out(group, cases[name])}
    return [item for item in items if item not in left], [item for item in items if item in left]


def _group(item: pytest.Item, parameters: tuple[str, ...]) -> tuple[object, ...]:
    call = getattr(item, "callspec", None)
    values = [] if call is None else [repr(call.params[name]) for name in parameters]
    return (item.nodeid.partition("[")[0], *values)


def is_skipped(item: pytest.Item) -> tuple[str, ...]:
    """Why, if it is. Those of a GPU where there is none are no share of the others."""
    marks = item.iter_markers("skipif")
    return tuple(str(mark.kwargs.get("reason")) for mark in marks if mark.args[:1] == (True,))


def _left_out(group: list[pytest.Item], cases: int) -> list[pytest.Item]:
    shuffled = sorted(group, key=lambda item: number_of(item.nodeid))
    return shuffled[-(-len(group) // cases) :]


def number_of(name: str) -> int:
    """A number that the commit and ``name`` determine."""
    digest = hashlib.sha256(f"{os.environ[SEED]} {name}".encode()).digest()
    return int.from_bytes(digest[:8])
