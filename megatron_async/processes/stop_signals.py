"""SIGINT and SIGTERM of the process that a terminal or a service manager has started: they
reach its event loop, and nothing of its end is cut short."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from megatron_async.processes.lifeline import STOP_SIGNALS, leave_signals_to_parent


def listen(signalled: Callable[[], None]) -> None:
    """Have ``signalled`` called in the running event loop for each signal. When the loop has ended
    signals do nothing any more: the rest of the process is its end.

    Raises:
        ValueError: this is not the main thread.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(signalled)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    # Python would give the signals their first meaning again when it takes itself apart.
    atexit.register(leave_signals_to_parent)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals of this thread wait. A process that it starts begins likewise: its first lines cannot
    be interrupted before :func:`~megatron_async.processes.lifeline.leave_signals_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
