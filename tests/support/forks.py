"""Forked processes for tests: what is imported, a process of one thread imports once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

import torch


def run_together(name: str, runs: Iterable[Callable[[], None]]) -> None:
    """Fork a process for each, and wait for them; where one fails, all end.

    Raises:
        SystemExit: one failed, which begins with ``name``.
    """
    running = {forked(run) for run in runs}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"{name}: a process ended with {status}")


def forked(run: Callable[[], None]) -> int:
    """The id of a process that does this and ends."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    # torch makes its threads anew behind a fork: by one thread, and not by two of autograd at once.
    torch.set_num_threads(torch.get_num_threads())
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
