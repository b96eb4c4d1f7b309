"""Connections of whole messages between two processes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from megatron_async.processes.lifeline import EXIT_ORPHAN

MOST_BYTES = 1 << 28
"""A message has at most this many bytes: a peer that says that more will come is not believed."""


class Call(Connection):
    """A connection of whole messages that any thread may send to."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._sending = threading.Lock()

    def recv_bytes(self, maxlength: int | None = MOST_BYTES) -> bytes:
        """The next message; raises EOFError or OSError when there will be none."""
        return super().recv_bytes(maxlength)

    def say(self, data: bytes) -> None:
        """Send ``data``; nothing happens where nobody listens: the reader learns of it."""
        with self._sending, contextlib.suppress(OSError):
            self.send_bytes(self._sealed(data))

    def say_at_once(self, data: bytes) -> None:
        """Send a few bytes, or nothing where that would have to wait."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):
                poll = select.poll()
                poll.register(self.fileno(), select.POLLOUT)
                if poll.poll(0):
                    self.send_bytes(self._sealed(data))
        finally:
            self._sending.release()

    def hang_up(self) -> None:
        """Close, also where another thread waits to send."""
        self.shut_down()
        with self._sending:
            self.close()

    def shut_down(self) -> None:
        """Have both ends read that there is no more. The thread that reads here closes it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    def _sealed(self, data: bytes) -> bytes:
        """A message as it is sent, in the order of sending."""
        return data


def _end_process() -> None:
    os._exit(EXIT_ORPHAN)


def listen(
    call: Call,
    take: Callable[[bytes], None],
    name: str,
    lost: Callable[[], object] = _end_process,
) -> None:
    """Call ``take`` with each message, in a thread of that name, and ``lost`` when the other
    process is gone: unless it says otherwise, this process ends then."""

    def run() -> None:
        try:
            while True:
                take(call.recv_bytes())
        except (EOFError, OSError):
            lost()

    threading.Thread(target=run, name=name, daemon=True).start()
