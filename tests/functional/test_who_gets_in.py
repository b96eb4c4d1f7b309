"""A running server is for its user alone, and its processes end with it however that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.openings import marked, openings, openings_below
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
RANKS = ["--tensor-model-parallel-size", "2"]
FRONT_ENDS = ["--api-server-count", "2"]
REPLICAS = ["--replicas", "2"]
NEEDS_RAY = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ENGINE, RANK, FRONT_END = "engine_process", "rank_process", "front_end_process"


class Running:
    """A server whose temporary files are in a directory that anybody may enter."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder = folder
        self.mark = f"MEGATRON_ASYNC_TEST={uuid.uuid4().hex}"
        self._log = folder / "log"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "megatron_async", "serve", "--device", "cpu"]
        with open(self._log, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *options],
                cwd=ROOT,
                stderr=log,
                env={**os.environ, "TMPDIR": str(folder), "RAY_TMPDIR": str(folder), name: value},
            )

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [pid for pid in marked(self.mark) if not is_zombie(pid)]

    def until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < end
            assert self.process.poll() is None or self.process.returncode < 0, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self._log.read_text()

    def serves(self) -> bool:
        return "http://" in self.said()

    def has(self, module: str, library: str = "") -> bool:
        """A process of a module is there, and has loaded a library."""
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if module in " ".join(each.cmdline()):
                    return library in Path(f"/proc/{each.pid}/maps").read_text()
        return False

    def kill(self) -> None:
        """As the kernel does where memory is short; waits until nothing is left."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.until(lambda: not self.pids())


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def begun(process: psutil.Process) -> bool:
    """It runs a program of its own. Between fork and exec a process has all descriptors of its
    parent, so one that is stopped there keeps the lifelines of all others open."""
    parent = process.parent()
    return parent is not None and process.cmdline() != parent.cmdline()


@contextlib.contextmanager
def running(*options: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        server = Running(Path(folder), list(options))
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()
            for pid in server.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        pytest.param([], [ENGINE], id="one engine"),
        pytest.param([*RANKS, *FRONT_ENDS], [ENGINE, RANK, FRONT_END], id="ranks"),
        pytest.param(REPLICAS, [ENGINE, "raylet"], id="replicas", marks=NEEDS_RAY),
    ],
)
def test_another_user_can_open_nothing_of_a_server(options: list[str], modules: list[str]) -> None:
    """And a server that is killed leaves no process."""
    with running(*options) as server:
        server.until(server.serves)
        assert all(server.has(module) for module in modules)
        found = [*openings(server.pids()), *openings_below(server.folder)]
        assert [each for each in found if each.wrong] == []
        ports = {each.name for each in found if each.kind == "tcp"}
        if options != REPLICAS:  # nobody but clients calls a server
            assert ports == {server.said().strip().rpartition("/")[2]}
        assert "udp" not in {each.kind for each in found}
        names = {os.path.basename(each.name) for each in found if each.kind in ("unix", "file")}
        assert names >= {"commands", "outputs"}
        assert RANKS[0] not in options or any("megatron-async-ranks" in name for name in names)
        for each in server.folder.iterdir():
            assert each.name == "log" or stat.S_IMODE(each.stat().st_mode) == 0o700, each
        server.kill()


@pytest.mark.parametrize(
    ("module", "library"),
    [(FRONT_END, ""), (ENGINE, "libtorch"), (RANK, "libtorch")],
    ids=["front ends begin", "the engine imports", "a rank imports"],
)
def test_processes_end_with_a_server_that_is_killed_while_they_start(
    module: str, library: str
) -> None:
    with running(*RANKS, *FRONT_ENDS) as server:
        server.until(lambda: server.has(module, library))
        assert not server.serves()
        for process in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if begun(process):  # none of them ends by itself, now or later
                    process.suspend()
        server.kill()
