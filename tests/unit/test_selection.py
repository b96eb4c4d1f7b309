"""The lists of test files: what they name exists, and the quick one covers each package.
Sweeps take a share of their cases."""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import turns
from tests.support.first_imports import begins_at_the_end, import_from_the_end
from tests.support.selection import LONG, QUICK
from tests.support.sweeps import CASES, SEED, share

ROOT = Path(__file__).parents[2]
FILES = {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
PACKAGES = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for tree in ("megatron_async",)
    for path in (ROOT / tree).glob("*/__init__.py")
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Names of modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_two_files_have_the_same_name() -> None:
    assert len(FILES) == len(list((ROOT / "tests").rglob("test_*.py")))


@pytest.mark.parametrize("names", (LONG, QUICK))
def test_listed_files_exist_once(names: tuple[str, ...]) -> None:
    assert len(set(names)) == len(names)
    assert [name for name in names if name not in FILES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_quick_selection_covers(package: str) -> None:
    place = package if package.startswith("megatron_async") else f"megatron_async.{package}"
    assert any(
        f"{module}.".startswith(f"{place}.") for name in QUICK for module in imported(FILES[name])
    ), f"add a fast file to QUICK in tests/support/selection.py that imports {place}"


def test_nothing_is_quick_and_long() -> None:
    assert set(QUICK) & set(LONG) == set()


class Case:
    """What :func:`share` looks at of a test."""

    def __init__(self, number: int, fault: int, *marks: pytest.Mark) -> None:
        self.nodeid = f"test_a.py::test_b[{number}]"
        self.callspec = SimpleNamespace(params={"fault": fault})
        self.marks = marks

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def shared(cases: list[Case]) -> list[Case]:
    taken, left = share(cases)  # type: ignore[arg-type]
    assert len(taken) + len(left) == len(cases)
    return taken  # type: ignore[return-value]


def test_a_sweep_takes_a_share_that_depends_on_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(n, n % 5, pytest.mark.sweep.mark) for n in range(80)]
    seen = set()
    for commit in map(str, range(99)):
        monkeypatch.setenv(SEED, commit)
        assert shared(cases) == shared(cases) and len(shared(cases)) == -(-80 // CASES)
        seen |= set(shared(cases))
    assert seen == set(cases)


def test_a_sweep_over_a_parameter_leaves_out_no_value_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SEED, "a")
    cases = [Case(n, n % 30, pytest.mark.sweep("fault").mark) for n in range(80)]
    assert len(shared(cases)) == 30
    assert {case.callspec.params["fault"] for case in shared(cases)} == set(range(30))


def test_a_sweep_says_how_large_its_share_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "a")
    assert len(shared([Case(n, 0, pytest.mark.sweep(of=2).mark) for n in range(9)])) == 5


def test_other_tests_and_those_that_are_skipped_are_no_part_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SEED, "a")
    sweep, skip = pytest.mark.sweep.mark, pytest.mark.skipif(True, reason="no GPU").mark
    cases = [*(Case(n, 0) for n in range(9)), *(Case(n, 0, sweep, skip) for n in range(9))]
    assert shared(cases) == cases
    assert len(shared([*cases, Case(9, 0, sweep)])) == len(cases) + 1


def has(file: str, names: list[str]) -> bool:
    """Whether a file has a function or a class, or one inside of another. A run of all tests has
    imported it; to parse hundreds of them takes seconds."""
    found: Any = sys.modules.get(file.removesuffix(".py").replace("/", "."))
    if found is not None:
        for one in names:
            found = getattr(found, one, None)
        return found is not None
    scope: ast.Module | ast.ClassDef = parsed(ROOT / file)
    for one in names:
        inside = {getattr(node, "name", None): node for node in scope.body}
        if one not in inside:
            return False
        scope = inside[one]
    return True


def test_what_is_in_a_file_is_found_imported_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    file, there = "tests/unit/test_selection.py", [["Case", "iter_markers"], ["Case"], []]
    assert __name__ == "tests.unit.test_selection"
    for _ in range(2):
        assert all(has(file, names) for names in there)
        assert not any(has(file, names) for names in (["Cases"], ["Case", "iter"]))
        monkeypatch.delitem(sys.modules, __name__, raising=False)


LISTS = sorted((ROOT / "tests" / "support").glob("long_*tests.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_tests_that_take_turns_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LIST", path)
    listed = turns.listed()
    assert len(LISTS) == 2 and list(listed) == sorted(listed) and len(listed) > 30
    assert len(path.read_text().splitlines()) == len(listed)
    for unit in listed:
        file, *names = unit.split("::")
        name = Path(file).name
        assert name not in turns.ALWAYS and (names == []) == (name in turns.TOGETHER)
        assert has(file, names), f"{unit} is gone: take it out of {path.name}"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_all_turns_take_about_as_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LIST", path)
    seconds = turns.listed()
    sums: Counter[int] = Counter()
    for unit, turn in turns.turns_of(seconds).items():
        sums[turn] += seconds[unit]
    longest = max(seconds.values())
    assert len(sums) == turns.TURNS
    assert max(sums.values()) <= max(1.05 * sums.total() / turns.TURNS, longest)


def test_each_long_test_has_its_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "long"
    together = sorted(turns.TOGETHER)[0]
    listed.write_text(
        f"9 test_a.py::test_b\n3 a/{together}\n"
        + "".join(f"{n} test_d.py::test_{n}\n" for n in range(2 * turns.TURNS))
    )
    monkeypatch.setattr(turns, "LIST", listed)
    long, short, shared = Case(1, 0), Case(2, 0), [Case(3, 0), Case(4, 0)]
    short.nodeid = "test_a.py::test_c[2]"
    shared[0].nodeid, shared[1].nodeid = f"a/{together}::test_d", f"a/{together}::test_e[1]"
    ran: Counter[str] = Counter()
    for commit in map(str, range(200)):
        monkeypatch.setenv(SEED, commit)
        left = turns.whose_turn_it_is_not([long, short, *shared])  # type: ignore[list-item]
        assert short not in left and len(left & {*shared}) in (0, 2)
        ran.update(case.nodeid for case in (long, *shared) if case not in left)
    assert len(ran) == 3
    for times in ran.values():
        assert 200 / turns.TURNS / 2 < times < 200 / turns.TURNS * 2


def test_of_cases_that_are_skipped_alike_one_is_shown() -> None:
    skips = [pytest.mark.skipif(True, reason=reason).mark for reason in ("no GPU", "no Triton")]
    runs = pytest.mark.skipif(False, reason="no GPU").mark
    one, same, other = (Case(n, 0, skips[why]) for n, why in enumerate((0, 0, 1)))
    elsewhere, taken = Case(4, 0, skips[0]), [Case(n, 0, runs) for n in (5, 6)]
    elsewhere.nodeid = "test_a.py::test_c[4]"
    cases = [one, same, other, elsewhere, *taken]
    assert turns.skipped_alike(cases) == {same}  # type: ignore[arg-type]


def test_long_tests_are_found_in_the_times_of_a_run(tmp_path: Path) -> None:
    times = tmp_path / "times.xml"
    case = '<testcase classname="tests.unit.{}" name="{}" time="{}"/>'
    cases = [
        case.format("test_a", "test_b[1]", 30), case.format("test_a", "test_b[2]", 31),
        case.format("test_a.TestC", "test_d", 30), case.format("test_a", "test_quick", 0.001),
        case.format("test_state_machine", "test_all", 500),
        case.format("test_ranks", "test_b", 20), case.format("test_ranks", "test_c[1]", 1),
    ]  # fmt: skip
    times.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert turns.long_tests(times) == {
        "tests/unit/test_a.py::TestC::test_d": 30, "tests/unit/test_a.py::test_b": 61,
        "tests/unit/test_ranks.py": 21,
    }  # fmt: skip


def test_every_second_process_imports_from_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(4):
        worker = SimpleNamespace(workerinput={"workerid": f"gw{number}"})
        assert begins_at_the_end(worker) == bool(number % 2)  # type: ignore[arg-type]
    assert not begins_at_the_end(SimpleNamespace())  # type: ignore[arg-type]
    package = tmp_path / "imported_from_the_end"
    package.mkdir()
    log = tmp_path / "log"
    for name, last in (
        ("a", ""),
        ("b", "raise ValueError"),
        ("c", "pytest.skip(allow_module_level=True)"),
    ):
        line = f"import pytest\nprint({name!r}, file=open({str(log)!r}, 'a'))\n{last}\n"
        (package / f"test_{name}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    import_from_the_end([package], tmp_path)
    assert log.read_text().split() == ["c", "b", "a"]
