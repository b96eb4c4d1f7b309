"""A child process that ends with its parent: ``python -m megatron_async.processes.lifeline FD
MODULE ...`` ties the process to the parent before anything else is imported, and then runs
``MODULE``. Signals that are meant for all processes of a group are left to the parent from the
first line on, and nothing that it writes to standard error waits.

``FD`` is the read end of a pipe, into which nobody writes, and of which only the parent has the
other end. When the parent is gone, however it ended, the kernel sends this process the signal that
it has asked for. No thread of Python has part in it: extension modules that are loaded, compilers
and drivers may keep the interpreter for many seconds. ``PR_SET_PDEATHSIG`` would do the same at the
end of the parent's *thread* that has started this process.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import select
import signal
import sys
from collections.abc import Mapping

from megatron_async.processes import standard_error

EXIT_ORPHAN = 3
F_SETSIG = 10
"""Linux's, which Python does not name."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def environment_of_child(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process and ``more``, with which a child finds this package, also in a
    checkout that is not installed."""
    folder = os.path.realpath(__file__)
    for _ in range(3):  # from this file to what the package is in
        folder = os.path.dirname(folder)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **more, "PYTHONPATH": path}


def leave_signals_to_parent() -> None:
    """A terminal's and a service manager's signals reach all processes. The first one lets requests
    end, and tells the others when to. What ``stop_signals.held`` has kept back is dropped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def hold_on(descriptor: int) -> None:
    """Have this process killed when the other end of a pipe is closed; end it if it is already."""
    os.set_inheritable(descriptor, False)
    if not kill_at_its_end(descriptor, os.getpid()):
        import threading

        threading.Thread(target=_wait, args=(descriptor,), name="lifeline", daemon=True).start()
    # After the line above: a parent that goes from here on is a signal.
    poll = select.poll()
    poll.register(descriptor, 0)
    if poll.poll(0):
        os._exit(EXIT_ORPHAN)


def kill_at_its_end(descriptor: int, pid: int) -> bool:
    """Have the kernel kill a process when the other end of a pipe is closed; False where it does
    not know how. This belongs to the pipe, whichever process says so."""
    if sys.platform != "linux":
        return False
    fcntl.fcntl(descriptor, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | fcntl.FASYNC)
    return True


def _wait(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(EXIT_ORPHAN)


if __name__ == "__main__":
    from megatron_async.processes.garbage import expect_imports  # which its parent does without

    leave_signals_to_parent()
    hold_on(int(sys.argv[1]))
    standard_error.unblock()
    expect_imports()
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
