"""The end of a connection whose client still sends.

When a socket is closed with something left to read, the kernel resets its connection, and the
client loses the answer that it has not read yet (RFC 9112, section 9.6). So only our side is closed
at first, as nginx does it: what still comes is dropped, until the client has closed its side too,
or a bound is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that is dropped behind a last answer.

    Args:
        most_bytes: that are read.
        seconds: for all of it.
        idle_seconds: for which nothing comes.
    """

    most_bytes: int = 64 * 1024 * 1024
    seconds: float = 30.0
    idle_seconds: float = 5.0


class Timer:
    """Calls ``action`` some seconds after its start, unless it is stopped."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Nothing happens when it runs."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        """Nothing happens when it does not run."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class LingeringTransport(asyncio.Transport):
    """A connection's transport, which :meth:`close` leaves open for what still comes.

    Args:
        transport: the event loop's.
        is_read: nothing of a request is left to come, as far as is known.

    Attributes:
        is_lingering: our side is closed; what comes is for :meth:`drop`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_read: Callable[[], bool],
        bounds: Bounds,
    ) -> None:
        super().__init__()
        self.is_lingering = False
        self._transport = transport
        self._is_read = is_read
        self._left = bounds.most_bytes
        self._over = Timer(loop, bounds.seconds, self.end)
        self._idle = Timer(loop, bounds.idle_seconds, self.end)

    def close(self) -> None:
        """Close our side, and the other one when nothing more is to come."""
        if self.is_closing():
            return
        if self._is_read() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._over.start()
        self._idle.start()

    def drop(self, size: int) -> None:
        """``size`` bytes have come that nobody wants."""
        self._left -= size
        if self._left < 0:
            self.end()
            return
        self._idle.stop()
        self._idle.start()

    def end(self) -> None:
        """Close both sides at once."""
        self._over.stop()
        self._idle.stop()
        self._transport.close()

    def is_closing(self) -> bool:
        """Nothing is to be written any more."""
        return self.is_lingering or self._transport.is_closing()

    def abort(self) -> None:
        """See the base, as for the methods below."""
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_lingering:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_lingering:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
