"""Limits of a process: of time and memory, which it sets for itself before it touches what others
sent, and of open files, which it finds."""

from __future__ import annotations

import os
import sys

from megatron_async.errors import ConfigError


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


def need_files(count: int, what: str) -> None:
    """Let this process and those that it starts have ``count`` open files each. It is asked before
    there are any: what lacks one later fails in ways of its own, or waits for ever.

    Args:
        what: needs them.

    Raises:
        ConfigError: the system lets it have fewer.
    """
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= count:
        return
    if most != resource.RLIM_INFINITY and most < count:
        raise ConfigError(
            f"{what} may need {count} open files in one process, and the limit is {most}; raise it "
            f"to {count} or more (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))


def limit_work(seconds: int) -> None:
    """Have this process killed when it has computed for ``seconds``: that others do, on a busy
    machine, does not count."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def limit_next_work(seconds: int) -> None:
    """Have this process killed when it has computed for ``seconds`` more, until the next call.
    It leaves no core."""
    import resource

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))
