"""The process that started this one, as this one sees it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from megatron_async.codec import Codec, encode
from megatron_async.errors import MegatronAsyncError
from megatron_async.processes.call import listen
from megatron_async.processes.messages import NotStarted, Preparing, Started
from megatron_async.processes.watching.beating import beats_of

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2

Said = TypeVar("Said")


class Parent(Generic[Said]):
    """The connection to the process that started this one.

    Args:
        descriptor: of the connection.
        said: type of the messages that come.
    """

    def __init__(self, descriptor: int, said: Any) -> None:
        self._call, self._beats = beats_of(descriptor)
        self._codec: Codec[Said] = Codec(said)

    def receive(self) -> Said:
        """The next message; raises EOFError when there is no parent any more."""
        return self._codec.decode(self._call.recv_bytes())

    def send(self, message: msgspec.Struct) -> None:
        """Send from any thread. Nothing happens where nobody listens: the watching thread ends the
        process. Once it is told that this process serves, the loop that serves must :meth:`beat`.
        """
        if isinstance(message, Started):
            self._beats.end()
        elif isinstance(message, Preparing):
            self._beats.begin()
        self._call.say(encode(message))

    def beat(self) -> None:
        """Give a sign of life. Waits for nobody."""
        self._beats.beat()

    def doing(self, what: str) -> None:
        """Have signs of life say what this process does, until it serves."""
        self._beats.doing = what

    def watch(self, take: Callable[[Said], None]) -> None:
        """Call ``take`` with each further message, in a thread of its own, and end the process when
        the parent is gone."""
        listen(self._call, lambda data: take(self._codec.decode(data)), "parent")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Tell the parent of an error of this package, which ends the process."""
        try:
            yield
        except MegatronAsyncError as error:
            self.send(NotStarted.because(error))
            sys.exit(EXIT_NOT_STARTED)
