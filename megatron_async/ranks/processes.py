"""The processes of ranks that were started here: how they end, and that they do."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

Process = subprocess.Popen[bytes]
EXIT_SECONDS = 5.0
"""For a rank that was told to end, or has hung up."""


def how_ended(process: Process | None) -> str:
    """What to say of a rank that is gone; None is one that somebody else has started."""
    status = None
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(EXIT_SECONDS)
    if status is None:
        return "has hung up"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def end_processes(processes: list[Process]) -> None:
    """One that hangs in a driver may not end even so, and is not waited for."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    wait_for(processes)


def wait_for(processes: list[Process]) -> None:
    """Give them :data:`EXIT_SECONDS` together to end."""
    deadline = time.monotonic() + EXIT_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
