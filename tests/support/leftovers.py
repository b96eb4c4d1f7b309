"""Processes that a run of the tests leaves behind: found by a variable that all of them inherit."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import psutil
import pytest

MARK = "MEGATRON_ASYNC_TEST_RUN"
WAIT_SECONDS = 30.0
"""For processes that are about to end, such as those that end with their parent."""


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no more; its parent may not have waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two calls
        return True


def left_behind(mark: str) -> list[psutil.Process]:
    """Running processes of this user that have ``mark``. Those below this process are none: what
    multiprocessing keeps for it ends with it."""
    own = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return found


def kill_all(processes: Sequence[psutil.Process]) -> list[str]:
    """What they were; those that end by themselves in a while are left out."""
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    told = []
    for process in alive:
        try:
            told.append(f"{process.pid}: {' '.join(process.cmdline())[:300]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return told


class Leftovers:
    """A plugin of the process that began the run. It fails a run that leaves processes."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.told: list[str] = []

    @pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.told = kill_all(left_behind(self.mark))
        if self.told and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.told:
            terminalreporter.section("processes that the tests left behind", red=True)
            for line in self.told:
                terminalreporter.line(line)


def watch_for_leftovers(config: pytest.Config) -> None:
    """In the process that begins a run. Workers, and runs that tests begin, are part of it."""
    if MARK in os.environ:
        return
    watcher, patch = Leftovers(), pytest.MonkeyPatch()
    patch.setenv(MARK, watcher.mark)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(watcher)
