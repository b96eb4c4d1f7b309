"""What one connection may take: an open file, and the time to say what it wants and to read it."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from megatron_async.serving.errors import error_body, json_response

logger = logging.getLogger(__name__)

HEADER_SECONDS = 60.0
"""For a request's headers to arrive, from its first byte or from the connection's beginning."""
UNREAD_SECONDS = 300.0
"""For which a client may read nothing of an answer that waits for it."""
RESERVED_FILES = 64
"""That connections leave to others: an engine process that is started again, logs, profiles."""
LOG_SECONDS = 60.0
"""Between two log lines on connections that are refused."""


def most_connections() -> int:
    """As many as this process may have open files, which are raised to what the system allows,
    but those that it needs itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return most - min(RESERVED_FILES, most // 2)


def limited_connection(
    most: int,
    *,
    header_seconds: float = HEADER_SECONDS,
    unread_seconds: float = UNREAD_SECONDS,
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with bounds that it has not.

    A connection beyond ``most`` is answered 503 and closed, so that others keep working. One whose
    headers do not arrive, or which does not read, is closed too.
    """
    busy = _busy_answer()
    uvicorns: Any = AutoHTTPProtocol
    logged = float("-inf")

    class LimitedConnection(uvicorns):  # type: ignore[misc]
        """One connection, see above."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self._headers_due = Timer(self.loop, header_seconds, self._abort)
            self._reading_due = Timer(self.loop, unread_seconds, self._abort)

        def connection_made(self, transport: asyncio.Transport) -> None:
            """It gets a place, if there is one."""
            if len(self.connections) < most:
                super().connection_made(transport)
                self._headers_due.start()
                return
            nonlocal logged
            if time.monotonic() > logged + LOG_SECONDS:
                logged = time.monotonic()
                logger.error("all %d connections are in use; further ones are refused", most)
            self.transport = transport
            transport.write(busy)
            transport.close()

        def data_received(self, data: bytes) -> None:
            """Part of a request."""
            if self.flow is None:  # it got no place
                return
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._headers_due.start()
            else:
                self._headers_due.stop()

        def pause_writing(self) -> None:
            """More of an answer waits than the client has read."""
            super().pause_writing()
            self._reading_due.start()

        def resume_writing(self) -> None:
            """It has read."""
            self._reading_due.stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            """It is over."""
            self._headers_due.stop()
            self._reading_due.stop()
            super().connection_lost(exc)

        def _abort(self) -> None:
            self.transport.abort()

    return LimitedConnection


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


def _busy_answer() -> bytes:
    said = "the server has as many connections as it can; try again later"
    response = json_response(error_body(503, said, code="too_many_connections"), 503)
    response.headers["Connection"] = "close"
    lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
    return b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n%b" % (b"".join(lines), bytes(response.body))
