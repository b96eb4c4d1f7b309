"""The lists of test files: what they name exists, and the quick one covers each package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.selection import LONG, QUICK

ROOT = Path(__file__).parents[2]
FILES = {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
PACKAGES = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for tree in ("megatron_async",)
    for path in (ROOT / tree).glob("*/__init__.py")
)


def imported(path: Path) -> set[str]:
    """Names of modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
