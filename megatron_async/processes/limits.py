"""Limits of time and memory that a process sets for itself, before it touches what others sent."""

from __future__ import annotations

import os
import sys


def limit_memory(size: int) -> None:
    """Let this process have ``size`` bytes beyond what it has now. An allocator that gets none
    raises MemoryError, or ends the process. Nothing happens where the system has no such limit."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_work(seconds: int) -> None:
    """Have this process killed when it has computed for ``seconds``: that others do, on a busy
    machine, does not count."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
