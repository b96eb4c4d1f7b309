"""``python -m megatron_async.replicas.aftermath FOLDER``: ends what is left of a Ray when the
process that has started it is gone, however that ended.

Ray's agents would go on for a minute, and its folder would stay. On stdin come the processes, each
as ``PID CREATED``, and ``keep`` where the folder is to stay. Its end is the end of the parent.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable

import psutil

from megatron_async.processes import stop_signals
from megatron_async.processes.lifeline import environment_of_child, leave_signals_to_parent

KEEP = "keep"
EXIT_SECONDS = 10.0


class Aftermath:
    """The parent's end."""

    def __init__(self, folder: str) -> None:
        with stop_signals.held():
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, folder],
                stdin=subprocess.PIPE,
                text=True,
                env=environment_of_child({}),
            )

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """Have these processes killed, with all that they have started."""
        for each in processes:
            with contextlib.suppress(psutil.Error):
                self._say(f"{each.pid} {each.create_time()!r}")

    def keep_folder(self) -> None:
        """Keep the folder for its log."""
        self._say(KEEP)

    def begin(self) -> None:
        """Kill what is left, and wait for that."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=EXIT_SECONDS)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            print(line, file=self._process.stdin, flush=True)


def main(folder: str) -> None:
    """Wait for the end of the parent."""
    leave_signals_to_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    said = sys.stdin.read().splitlines()
    found: list[psutil.Process] = []
    for line in said:
        with contextlib.suppress(psutil.Error, ValueError):
            pid, created = line.split()
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                found += [process, *process.children(recursive=True)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, EXIT_SECONDS / 2)
    if KEEP not in said:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
