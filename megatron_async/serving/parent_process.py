"""The process that started this one, as this one sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from megatron_async.codec import Codec, encode
from megatron_async.lifeline import EXIT_ORPHAN

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2

Said = TypeVar("Said")


def leave_signals_to_parent() -> None:
    """A terminal's and a service manager's signals reach all processes of the server. The first one
    lets requests end, and tells the others when to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Parent(Generic[Said]):
    """The connection to the process that started this one.

    Args:
        descriptor: of the connection.
        said: type of the messages that come.
    """

    def __init__(self, descriptor: int, said: Any) -> None:
        os.set_inheritable(descriptor, False)  # compilers that a kernel needs must not keep it open
        self._connection = Connection(descriptor)
        self._codec: Codec[Said] = Codec(said)
        self._sending = threading.Lock()

    def receive(self) -> Said:
        """The next message; raises EOFError when there is no parent any more."""
        return self._codec.decode(self._connection.recv_bytes())

    def send(self, message: msgspec.Struct) -> None:
        """From any thread. Nothing happens where nobody listens: the watching thread ends the
        process."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(encode(message))

    def watch(self, take: Callable[[Said], None]) -> None:
        """Call ``take`` with each further message, in a thread of its own, and end the process when
        the parent is gone."""
        threading.Thread(target=self._watch, args=(take,), name="parent", daemon=True).start()

    def _watch(self, take: Callable[[Said], None]) -> None:
        try:
            while True:
                take(self.receive())
        except (EOFError, OSError):
            os._exit(EXIT_ORPHAN)
