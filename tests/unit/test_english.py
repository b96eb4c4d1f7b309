"""The prose of docstrings and comments: a sentence has its subject, and a number its name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_async", "inference", "scripts")

MOST_WHO = 6
"""Places that say "who", all of people. It may fall: for a thing the word is "which" or "that"."""
SUSPECT = re.compile(
    r"""["'#:\\]\s*(?:(?:That |Those )?[Oo]f|Those that)\s|"""
    r"[sS]o[\s#]+m(?:any|uch)\b|[wW]ho(?:ever|m)?\b"
)
"""What the text of a file has if its prose has a fault: to parse all of them takes seconds."""


class Prose(NamedTuple):
    """One docstring, or comments that follow each other in lines of their own."""

    place: str
    first_line: int
    text: str

    def said(self, at: int, what: str) -> str:
        line = self.first_line + self.text.count("\n", 0, at)
        return f"{self.place}:{line}: {what}"


def _docstrings(source: str, place: str) -> Iterator[Prose]:
    """Yield those of modules, classes, functions and names: strings that stand as statements."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Prose(place, node.lineno, text)


def _comments(source: str, place: str) -> Iterator[Prose]:
    lines: list[str] = []
    last, first = -1, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number, column = token.start
        is_alone = not token.line[:column].strip()
        if lines and (not is_alone or number != last + 1):
            yield Prose(place, first, "\n".join(lines))
            lines = []
        if not lines:
            first = number
        lines.append(token.string.lstrip("#: "))
        last = number if is_alone else -1
    if lines:
        yield Prose(place, first, "\n".join(lines))


def prose_of(source: str, place: str) -> list[Prose]:
    """Return the texts of a file; none where no word is suspect."""
    if not SUSPECT.search(source):
        return []
    return [*_docstrings(source, place), *_comments(source, place)]


def faults(prose: Prose) -> list[str]:
    """Where a text begins without a subject, or a number has no name."""
    found = []
    if re.match(r"\s*Of\s", prose.text):
        found.append(prose.said(0, 'begins with "Of": say what it is, "The names of ..."'))
    if match := re.match(r"\s*(That of|Those of|Those that)\s", prose.text):
        found.append(prose.said(0, f'begins with "{match[1]}": name the thing, "The rows of ..."'))
    for match in re.finditer(r"\bso\s+(many|much)\b", prose.text, re.IGNORECASE):
        what = f'"so {match[1]}": name the number, "at most ``limit`` rows"'
        found.append(prose.said(match.start(), what))
    return found


def whos(prose: Prose) -> list[str]:
    matches = re.finditer(r"\bwho(ever|m)?\b", prose.text, re.IGNORECASE)
    return [prose.said(match.start(), f'"{match[0]}"') for match in matches]


@cache
def all_prose() -> tuple[Prose, ...]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found: list[Prose] = []
    for path in [*files, ROOT / "setup.py"]:
        found += prose_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    return tuple(found)


def test_texts_have_subjects_and_name_their_numbers() -> None:
    found = [fault for prose in all_prose() for fault in faults(prose)]
    assert not found, "\n".join(found)


def test_who_is_for_people() -> None:
    found = [who for prose in all_prose() for who in whos(prose)]
    shown = f"{len(found)} texts say who, at most {MOST_WHO} may; for things say which:\n"
    assert len(found) <= MOST_WHO, shown + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Of a module."""', [1]),
        ('def f():\n    """\n    Of it."""', [2]),
        ('x = 1\n"""Of a name."""', [2]),
        ("x = 1  # Of it", [1]),
        ("# It is a part\n# Of it", []),
        ("x = 1  # at the end\n# Of another", [2]),
        ("def f(rows):\n    '''Make it.\n\n    For so\n    many rows.'''", [4]),
        ("x = 1\n# one\n# So much more", [3]),
        ('x = "Of so many"', []),
        ('"""\\\nOf it."""', [1]),
        ("x = 1  #: Of it", [1]),
        ("# as so\n# many", [1]),
        ('"""Offered so. Many of these, and of those."""', []),
        ('"""That of a module."""', [1]),
        ("x = 1\n# Those that\n# wait", [2]),
        ('"""Those wait that of all have least."""', []),
    ],
)
def test_lint_finds_the_lines(source: str, lines: list[int]) -> None:
    found = [fault for prose in prose_of(source, "a.py") for fault in faults(prose)]
    assert [int(fault.split(":")[1]) for fault in found] == lines


def test_lint_counts_who_and_not_whose() -> None:
    (prose,) = prose_of('"""Who asks, whoever it is: whose rows, and who."""', "a.py")
    assert len(whos(prose)) == 3
