"""Processes that this one starts: how they begin, and that they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_async.processes import lifeline, stop_signals

EXIT_SECONDS = 5.0
"""For a process that was told to end, or has hung up."""


class Child(subprocess.Popen[bytes]):
    """A running ``python -m module FD *arguments``, which ends with this process, and with this
    object. ``FD`` is its end of a connection to this process.

    Args:
        inherited: descriptors that it keeps, under the same numbers.
        environment: variables beside those of this process.
        prepare: called with this process's end of the connection before the child starts.

    Attributes:
        connection: this process's end.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        read_end, write_end = os.pipe()
        self.lifeline = os.fdopen(write_end, "wb", buffering=0)
        """Nobody else has it. The process is killed when it is closed."""
        self.connection, other = socket.socketpair()
        try:
            prepare(self.connection)
            command = ["-m", lifeline.__name__, str(read_end), module, str(other.fileno())]
            with stop_signals.held():
                super().__init__(
                    [sys.executable, *command, *arguments],
                    pass_fds=[read_end, other.fileno(), *inherited],
                    stdin=subprocess.DEVNULL,
                    env=lifeline.environment_of_child(environment or {}),
                )
            lifeline.kill_at_its_end(read_end, self.pid)  # it may be stopped before its first line
        except BaseException:
            self.connection.close()
            raise
        finally:
            os.close(read_end)
            other.close()


def how_ended(process: Child | None) -> str:
    """What to say of a process that is gone; None is one that somebody else has started."""
    status = None
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(EXIT_SECONDS)
    if status is None:
        return "has hung up"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def end_processes(processes: Sequence[Child]) -> None:
    """One that hangs in a driver may not end even so, and is not waited for."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    wait_for(processes)


def wait_for(processes: Sequence[Child]) -> None:
    """Give them :data:`EXIT_SECONDS` together to end."""
    deadline = time.monotonic() + EXIT_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
