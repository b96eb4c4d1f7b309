"""Processes whose kernels wait for each other's on two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def both_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One group of such processes at a time, of all that pytest-xdist runs."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "both_gpus.lock"):
        yield


def found_by(program: str, *arguments: Any) -> Any:
    """What a program says in the last line of its output, as JSON. Its arguments are JSON too, but
    for those that are strings or paths."""
    given = [str(each) if isinstance(each, str | Path) else json.dumps(each) for each in arguments]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *given],
        env=child_environment(),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])
