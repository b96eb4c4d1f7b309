"""Releases of megatron-core that were tried: models, tokens at all depths, checkpoints of each
other release, Megatron's scripts; each in a process of its own. One runs beside the installed one,
by the commit; all of them with ``--all``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.megatron_compat import installed
from tests.support.programs import process_group
from tests.support.releases import NoReleaseError, others, release_path
from tests.support.sweeps import drawn

ROOT = Path(__file__).parents[2]


class Ranks:
    """Two processes that import one release; the second one helps to save shards."""

    def __init__(self, version: str, folder: Path, group: int) -> None:
        place = release_path(version)
        (folder / version).mkdir()
        path = [str(ROOT), *([] if place is None else [str(place)])]
        path = path[1:] + path[:1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self.version = version
        self._log = (folder / f"{version}.log").open("w+")
        command = [sys.executable, "-m", "tests.support.release_program", version, str(folder)]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)], cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                process_group=group,
            )
            for rank in range(2)
        ]  # fmt: skip

    def begin(self, phase: str, ranks: int = 1) -> None:
        for process in self._processes[:ranks]:
            assert process.stdin is not None
            process.stdin.write(f"{phase}\n")
            process.stdin.flush()

    def failed(self, ranks: int = 1) -> dict[str, str]:
        """What went wrong in the phase that was begun."""
        found: dict[str, str] = {}
        for process in self._processes[:ranks]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self._log.seek(0)
                return {"process": self._log.read()[-3000:]}
            found |= json.loads(line)["failed"]
        return found

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


@contextlib.contextmanager
def running(versions: list[str], folder: Path) -> Iterator[list[Ranks]]:
    with contextlib.ExitStack() as stack:
        group, found = stack.enter_context(process_group()), []
        for version in versions:
            found.append(Ranks(version, folder, group))
            stack.callback(found[-1].end)
        yield found


@pytest.mark.slow
def test_each_release_serves_the_models_and_checkpoints_of_all(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    versions, missing = [installed().version], []
    chosen = others() if pytestconfig.getoption("--all") else [drawn(others())]
    for version in chosen:
        try:
            release_path(version)
        except NoReleaseError as error:
            missing.append(f"megatron-core {version}: {error}")
        else:
            versions.append(version)
    if len(versions) == 1:
        pytest.skip("; ".join(missing))
    failures: dict[str, Any] = {}
    with running(versions, tmp_path) as releases:
        for phase, ranks in (("save", 2), ("models", 1), ("scripts", 1), ("load", 1)):
            # The suite runs the scripts of the installed one.
            busy = releases[phase == "scripts" :]
            for release in busy:
                release.begin(phase, ranks)
            for release in busy:
                if failed := release.failed(ranks):
                    failures[f"{release.version}, {phase}"] = failed
    assert not failures, "\n".join(
        f"{where}: {name}: {why}"
        for where, names in failures.items()
        for name, why in names.items()
    )
    for kind in ("dense", "mtp", "moe", "latents", "hybrid"):
        tokens = {(tmp_path / version / f"{kind}.json").read_text() for version in versions}
        assert len(tokens) == 1, kind
    if missing:
        pytest.skip("tried without " + "; ".join(missing))
