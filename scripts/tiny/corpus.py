"""Training text of the embedded model: functions and classes of Python's standard library."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

END, BEGIN, PAD, VOCAB_SIZE = 256, 257, 258, 264
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HELD_OUT = 0.05
"""Share of the files that go to validation, chosen by a hash of their names."""
BARE_SHARE = 0.15
"""The share of the documents that come without ``<|begin|>``: a prompt without it is no surprise
then."""
WINDOW = 24
"""A row is filled up with one of this many documents that come next."""

Tokens = npt.NDArray[np.int16]


class Document(NamedTuple):
    """One function, method or class, dedented; ``is_test`` if it comes from a test suite."""

    text: bytes
    is_test: bool


class Corpus(NamedTuple):
    """Documents split by file; no text occurs twice, and none in both parts."""

    training: list[Document]
    validation: list[Document]


def source_of(node: ast.stmt, lines: list[str]) -> str:
    """The node's lines without its indentation; lines of strings that have less keep theirs."""
    indent = node.col_offset
    kept = lines[node.lineno - 1 : node.end_lineno]
    dedented = [line[indent:] if line[:indent].isspace() or not indent else line for line in kept]
    return "".join(dedented).rstrip() + "\n"


def documents_of(path: Path) -> Iterator[str]:
    """Top-level functions and classes of a file, and the classes' methods."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield source_of(node, lines)
        members = node.body if isinstance(node, ast.ClassDef) else []
        yield from (source_of(each, lines) for each in members if isinstance(each, FUNCTIONS))


def read_corpus(longest: int, limit_files: int | None = None) -> Corpus:
    """Read this Python's standard library.

    Args:
        longest: in bytes; longer classes are left out (their methods are documents of their own).
        limit_files: read about this many files only, spread over the library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.parts)]
    corpus, seen = Corpus([], []), set()
    for path in paths[:: max(1, len(paths) // limit_files) if limit_files else 1]:
        name = path.relative_to(root)
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        is_validation = int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32
        part = corpus.validation if is_validation else corpus.training
        is_test = any(folder in ("test", "tests", "idle_test") for folder in name.parts)
        for text in documents_of(path):
            data = text.encode()
            too_long = len(data) > longest and text.startswith("class ")
            if text in seen or too_long or len(data) < 24 or "\r" in text or "\0" in text:
                continue
            seen.add(text)
            part.append(Document(data, is_test))
    return corpus


def tokens_of(document: Document, with_begin: bool = True) -> Tokens:
    """``<|begin|>`` (unless left out), the bytes, ``<|endoftext|>``."""
    body = np.frombuffer(document.text, dtype=np.uint8).astype(np.int16)
    return np.concatenate((np.full(int(with_begin), BEGIN, np.int16), body, [np.int16(END)]))


def pack(documents: list[Document], length: int, seed: int, test_share: float) -> Tokens:
    """One epoch in random order: int16 ``[rows, length + 1]``, no padding.

    A row starts with a document and holds whole ones that fit; the rest of the row is the start of
    another. A document longer than a row is cut into rows. ``test_share`` of the test suites'
    documents are used.
    """
    rng = random.Random(seed)
    chosen = [d for d in documents if not d.is_test or rng.random() < test_share]
    rng.shuffle(chosen)
    waiting = [tokens_of(d, rng.random() >= BARE_SHARE) for d in reversed(chosen)]
    size = length + 1
    rows: list[Tokens] = []
    while waiting:
        row = [waiting.pop()]
        while row[0].size > size:
            rows.append(row[0][:size])
            row[0] = row[0][size:]
        room = size - row[0].size
        while room and waiting:
            near = range(len(waiting) - 1, max(len(waiting) - 1 - WINDOW, -1), -1)
            fitting = next((i for i in near if waiting[i].size <= room), None)
            row.append(waiting[-1][:room] if fitting is None else waiting.pop(fitting))
            room -= row[-1].size
        if not room:
            rows.append(np.concatenate(row))
    rng.shuffle(rows)
    return np.stack(rows) if rows else np.empty((0, size), np.int16)
