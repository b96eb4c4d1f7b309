"""Walls: how many modules a folder has, and that no import leads back to where it began."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_async"
MOST_FILES = 14
"""Python files of a folder, ``__init__.py`` among them."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def folders_over(most: int) -> dict[str, int]:
    """How many files each folder has that has more than ``most``."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) for f in folders}
    return {folder: count for folder, count in sorted(counts.items()) if count > most}


def test_folders_have_at_most_14_files() -> None:
    assert folders_over(MOST_FILES) == {}
    assert folders_over(MOST_FILES - 1)  # the wall is felt


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    """What lies in ``tests/unit`` itself looks at the whole tree."""
    tests = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    assert [str(folder) for folder in folders if not (PACKAGE / folder).is_dir()] == []
    assert len(list(tests.glob("test_*.py"))) <= MOST_FILES


@cache
def imports(name: str) -> frozenset[str]:
    """Our modules that one names in an import anywhere: on top, in a function, or for types alone.
    The package itself is left out, whose names are loaded when they are asked for."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else node.module)
    return frozenset(found & FILES.keys() - {name, "megatron_async"})


def test_what_is_imported_of_this_package_exists() -> None:
    """mypy takes what it does not find for a library without types."""
    missing = []
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            asked = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                asked = [alias.name for alias in node.names]
            ours = [m for m in asked if m is not None and m.split(".")[0] == "megatron_async"]
            missing += [f"{name} imports {module}" for module in ours if module not in FILES]
    assert missing == []


def circle(modules: dict[str, frozenset[str]]) -> list[str]:
    """Modules each of which imports the next, from one back to itself; [] if there are none."""
    try:
        graphlib.TopologicalSorter(modules).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1][::-1]
        return found
    return []


def test_no_imports_run_in_circles() -> None:
    assert circle({name: imports(name) for name in FILES}) == []


@pytest.mark.parametrize(
    ("arrows", "expected"),
    [
        ({"a": "b", "b": "c", "c": ""}, ""),
        ({"a": "b", "b": "a", "c": "a"}, "ab"),
        ({"a": "b", "b": "cd", "c": "a", "d": ""}, "abc"),
    ],
)
def test_circles_are_seen(arrows: dict[str, str], expected: str) -> None:
    assert set(circle({name: frozenset(others) for name, others in arrows.items()})) == set(
        expected
    )
