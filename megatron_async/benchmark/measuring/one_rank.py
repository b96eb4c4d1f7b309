"""The same load on one rank, before several ranks take the GPUs: another process measures it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ONE_RANK = "one"
"""The name of this baseline."""
_OF_RANKS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--pipeline-micro-batches",
    "--rank-timeout-seconds",
    "--baseline",
)
"""Options, each with a value, that one rank is measured without."""
_OF_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which torchrun tells a process of the others."""


def measure_one_rank(command: str) -> dict[str, Any]:
    """What ``bench`` measures on one rank, as a baseline: its ``name``, the rows of its report as
    ``results``, and why there are not more in ``skipped``.

    Args:
        command: the command line that measures several ranks.
    """
    found: dict[str, Any] = {"name": ONE_RANK, "results": [], "skipped": []}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = [*_words_of_one(shlex.split(command)[2:]), "--json", str(report)]
        ended = subprocess.run(
            [sys.executable, "-m", "megatron_async", "bench", *words],
            env=_environment_of_one(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        rows = json.loads(report.read_text())["results"] if report.exists() else []
    for row in rows:
        where = f"batch {row.get('batch')}, depth {row['depth']}"
        if "error" in row:
            found["skipped"].append(f"{where}: {row['error']}")
        else:
            found["results"].append({**row, "engine": f"one rank, depth {row['depth']}"})
    if ended.returncode and not found["skipped"]:
        said = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        found["skipped"].append(said[-1])
    return found


def _environment_of_one() -> dict[str, str]:
    """The variables of this process, but for those of a launcher."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHER and not name.startswith("TORCHELASTIC_")
    }


def _words_of_one(words: list[str]) -> Iterator[str]:
    """The options that one rank is measured with."""
    given = iter(words)
    for word in given:
        if word in _OF_RANKS:
            next(given)
        elif word != "--startup":
            yield word
