"""Tests that take long, of which each commit takes those whose turn it is.

With ``--turns``, which ``./scripts/test`` gives when it runs all, one of :data:`TURNS` of the
functions in ``long_tests.txt`` runs, chosen by the commit as in ``sweeps.py``; all other tests run
as always. After a run with times the list is written anew:

    ./scripts/test --all --junitxml=times.xml
    python -m tests.support.turns times.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.sweeps import number_of

TURNS = 4
LIST = Path(__file__).with_name("long_tests.txt")
LONG_SHARE = 0.0004
"""A function is long that takes more than this share of a run."""
ALWAYS = (
    "test_engine_parity.py",
    "test_interpreted_kernels.py",
    "test_mutants.py",
    "test_state_machine.py",
)
"""Files that every run takes: what correctness stands on."""


def function_of(nodeid: str) -> str:
    """The test function of a case: ``path::[class::]function``."""
    return nodeid.partition("[")[0]


def whose_turn_it_is_not(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests whose turn it is not."""
    long = set(LIST.read_text().split())
    functions = {function: number_of(function) % TURNS for function in long}
    return {item for item in items if functions.get(function_of(item.nodeid), 0)}


def long_functions(times: Path) -> list[str]:
    """Functions that took long in a run, from its JUnit file."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(times).iter("testcase"):
        parts = case.get("classname", "").split(".")
        module = next((n for n, part in enumerate(parts) if part.startswith("test_")), None)
        if module is None:  # a file that was left out whole
            continue
        path = "/".join(parts[: module + 1]) + ".py"
        if path.rpartition("/")[2] not in ALWAYS:
            name = function_of(case.get("name", ""))
            seconds["::".join((path, *parts[module + 1 :], name))] += float(case.get("time", 0))
    least = LONG_SHARE * seconds.total()
    return sorted(function for function, taken in seconds.items() if taken > least)


if __name__ == "__main__":
    LIST.write_text("".join(f"{function}\n" for function in long_functions(Path(sys.argv[1]))))
