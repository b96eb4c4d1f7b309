"""Modules that are imported from the end.

Workers that import the same modules in the same order compile each of them at the same time, where
there is no bytecode yet: as often as there are workers. Every second one begins at the end, and
finds in the middle what another has compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest


def begins_at_the_end(config: pytest.Config) -> bool:
    """Of the workers of a run every second does; a run that one of them starts does not."""
    worker: str = getattr(config, "workerinput", {}).get("workerid", "gw0")
    return bool(int(worker.removeprefix("gw")) % 2)


def import_from_the_end(folders: Iterable[Path], root: Path) -> None:
    """Their test modules. What fails is imported once more, and told, when it is collected."""
    paths = (path for folder in folders for path in folder.rglob("test_*.py"))
    for path in sorted(paths, reverse=True):
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
