"""Tests that take long, of which each commit takes those whose turn it is.

With ``--turns``, which ``./scripts/test`` gives when it runs all, one of :data:`TURNS` of the
functions in ``long_tests.txt`` runs; all other tests run as always. The commit says whose turn it
is, as in ``sweeps.py``. Each function stands there with its seconds, and all turns take about as
long. The process that interprets kernels has a list of its own. After runs with times the lists are
written anew:

    ./scripts/test --all --junitxml=times.xml
    python -m tests.support.turns times.xml
    export TRITON_INTERPRET=1  # with the files of test_interpreted_kernels.py, a share of the cases
    python -m pytest --junitxml=times.xml FILE...
    python -m tests.support.turns times.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.interpreter import INTERPRETED
from tests.support.sweeps import is_skipped, number_of

TURNS = 8
LIST = Path(__file__).with_name(f"long_{'interpreted_' * INTERPRETED}tests.txt")
LONG_SHARE = 0.004 if INTERPRETED else 0.0004
"""A function is long that takes more than this share of a run."""
ALWAYS = (
    "test_engine_parity.py",
    "test_interpreted_kernels.py",
    "test_mutants.py",
    "test_state_machine.py",
)
"""Files that every run takes: what correctness stands on."""
TOGETHER = (
    "test_bench.py",
    "test_bench_drafts.py",
    "test_bench_ragged.py",
    "test_rank_weights.py",
    "test_ranks.py",
    "test_reshard_plans.py",
    "test_scenarios.py",
    "test_sharded_updates.py",
    "test_trace.py",
    "test_trace_ranks.py",
    "test_users_ranks.py",
)
"""Files with a fixture that takes long, and that nearly any of their tests has made: all of them
have one turn."""


def function_of(nodeid: str) -> str:
    """The test function of a case: ``path::[class::]function``."""
    return nodeid.partition("[")[0]


def unit_of(nodeid: str) -> str:
    """What has a turn: a case's function, or its whole file."""
    path = nodeid.partition("::")[0]
    return path if path.rpartition("/")[2] in TOGETHER else function_of(nodeid)


def listed() -> dict[str, float]:
    """What takes long, with its seconds."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {unit: float(seconds) for seconds, unit in lines}


def turns_of(seconds: Mapping[str, float]) -> dict[str, int]:
    """Each one's turn. The longest come first, each to the turn that has least."""
    sums, turns = [0.0] * TURNS, {}
    for unit in sorted(seconds, key=lambda unit: (-seconds[unit], unit)):
        turns[unit] = sums.index(min(sums))
        sums[turns[unit]] += seconds[unit]
    return turns


def whose_turn_it_is_not(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests whose turn it is not."""
    turns, now = turns_of(listed()), number_of("turn") % TURNS
    return {item for item in items if turns.get(unit_of(item.nodeid), now) != now}


def skipped_alike(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Cases that are skipped, as others of their function are: all but the first one."""
    seen, alike = set(), set()
    for item in items:
        if reasons := is_skipped(item):
            kind = (function_of(item.nodeid), reasons)
            if kind in seen:
                alike.add(item)
            seen.add(kind)
    return alike


def long_tests(times: Path) -> dict[str, float]:
    """What took long in a run, from its JUnit file, with its seconds."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(times).iter("testcase"):
        parts = case.get("classname", "").split(".")
        module = next((n for n, part in enumerate(parts) if part.startswith("test_")), None)
        if module is None:  # a file that was left out whole
            continue
        path = "/".join(parts[: module + 1]) + ".py"
        if path.rpartition("/")[2] not in ALWAYS:
            nodeid = "::".join((path, *parts[module + 1 :], case.get("name", "")))
            seconds[unit_of(nodeid)] += float(case.get("time", 0))
    least = LONG_SHARE * seconds.total()
    return {unit: taken for unit, taken in sorted(seconds.items()) if taken > least}


if __name__ == "__main__":
    found = long_tests(Path(sys.argv[1]))
    LIST.write_text("".join(f"{taken:.1f} {unit}\n" for unit, taken in found.items()))
