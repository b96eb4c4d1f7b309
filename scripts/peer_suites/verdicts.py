"""How a test counts: passed, skipped, failed as expected by a reason, or unexpectedly."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

EXPECTED = Path(__file__).parent / "expected.toml"


@dataclasses.dataclass(frozen=True)
class Ended:
    """A test that has ended.

    Attributes:
        outcome: ``passed``, ``skipped`` or ``failed``, as pytest says.
        said: the end of its report.
    """

    test: str
    outcome: str
    said: str = ""

    @property
    def error(self) -> str:
        """The last line of its report that tells an error."""
        lines = [line[1:].strip() for line in self.said.splitlines() if line.startswith("E")]
        return lines[0] if lines else self.said.strip().rpartition("\n")[2]


@dataclasses.dataclass(frozen=True)
class Expected:
    """Failures that are known, and why.

    Attributes:
        suite: a regular expression that its whole name must match.
        test: regular expressions, of which one must be found in a test's id.
        error: one that must be found in the test's report.
    """

    reason: str
    suite: str = ".*"
    test: tuple[str, ...] = ("",)
    error: str = ""

    def fits(self, suite: str, ended: Ended) -> bool:
        """Whether a failure of a suite is this one."""
        named = any(re.search(each, ended.test) for each in self.test)
        known = named and re.search(self.error, ended.said)
        return bool(known and re.fullmatch(self.suite, suite))


def read_expected(path: Path = EXPECTED) -> list[Expected]:
    """The entries of a file like ``expected.toml``; the first that fits a test counts."""
    entries = tomllib.loads(path.read_text())["expected"]
    return [Expected(**{**each, "test": tuple(each.get("test", [""]))}) for each in entries]


def read_report(path: Path) -> list[Ended]:
    """The tests that a run has written down, each once: a failure wins over what else it said."""
    found: dict[str, Ended] = {}
    for line in path.read_text().splitlines():
        ended = Ended(**json.loads(line))
        if ended.test not in found or ended.outcome == "failed":
            found[ended.test] = ended
    return list(found.values())


@dataclasses.dataclass
class Verdicts:
    """The tests of a suite by how they count."""

    suite: str
    passed: int = 0
    skipped: int = 0
    expected: Counter[str] = dataclasses.field(default_factory=Counter)
    unexpected: list[Ended] = dataclasses.field(default_factory=list)

    def table(self) -> str:
        """Counts, reasons, and each unexpected failure with its error."""
        counts = f"{self.passed} passed, {self.expected.total()} failed as expected, "
        counts += f"{len(self.unexpected)} failed unexpectedly, {self.skipped} skipped"
        reasons = [f"  {count:5} {reason}" for reason, count in self.expected.most_common()]
        others = [f"  UNEXPECTED {each.test}\n        {each.error}" for each in self.unexpected]
        return "\n".join([f"{self.suite}: {counts}", *reasons, *others])


def judge(suite: str, tests: Iterable[Ended], expected: Iterable[Expected]) -> Verdicts:
    """Count the tests of a suite."""
    known, found = list(expected), Verdicts(suite)
    for ended in tests:
        if ended.outcome == "passed":
            found.passed += 1
        elif ended.outcome == "skipped":
            found.skipped += 1
        elif reason := next((each.reason for each in known if each.fits(suite, ended)), None):
            found.expected[reason] += 1
        else:
            found.unexpected.append(ended)
    return found
