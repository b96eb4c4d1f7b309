"""What one connection may take: an open file, and the time to say what it wants and to read it."""

from __future__ import annotations

import asyncio
import http
import logging
import resource
import sys
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_async.serving.http.errors import error_body, json_response
from megatron_async.serving.http.lingering import Bounds, LingeringTransport, Timer

logger = logging.getLogger(__name__)

HEAD_BYTES = 64 * 1024
"""The most that a request's line, headers and trailers have."""
HEAD_FIELDS = 256
PART_BYTES = 4096
"""The most that is parsed at a time, and with it the small requests that come at once."""
FRAMING = 8
"""Bytes of a chunked body's framing for each byte of the body."""
UNPARSED_BYTES = 1024 * 1024
"""The most that may come behind a request that has not been answered."""
READ_AHEAD_BYTES = 64 * 1024
"""Reading goes on until these wait: else nobody would notice that the client has left."""
HEADER_SECONDS = 60.0
"""For a request's headers to arrive, from its first byte or from the connection's beginning."""
UNREAD_SECONDS = 300.0
"""For which a client may read nothing of an answer that waits for it."""
RESERVED_FILES = 64
"""That connections leave to others: an engine process that is started again, logs, profiles."""
MOST_REFUSED = 16
"""Refused connections, of those files, that may still send what nobody wants."""
LOG_SECONDS = 60.0
"""Between two log lines on connections that are refused."""


def most_connections() -> int:
    """The open files that this process may have, raised to what the system allows, but for those
    that it needs itself."""
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
    lingering: Bounds = Bounds(),  # noqa: B008 - frozen
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with bounds that it has not.

    A connection beyond ``most`` is answered 503 and closed, so that others keep working. One whose
    headers do not arrive, or which does not read, is closed too. Too long a request line, headers
    or trailers are answered 431, and what is no HTTP 400. Requests that are sent ahead wait
    unparsed until those before them are answered. A client that still sends when its last answer
    is written can read it. A request that offers another protocol, as those of Java's client do, is
    read and answered like any other.

    Args:
        lingering: of what comes behind a last answer.
    """
    busy = _answer(
        503,
        "the server has as many connections as it can; try again later",
        "too_many_connections",
    )
    too_long = _answer(
        431,
        f"the request line and headers have more than {HEAD_BYTES:,} bytes, or {HEAD_FIELDS} "
        "fields, the most that this server takes",
        "headers_too_large",
    )
    not_http = _answer(
        400, "the request is not valid HTTP/1.1; its connection is closed", "invalid_http"
    )
    uvicorns: Any = HttpToolsProtocol
    logged = float("-inf")
    refused: set[asyncio.Protocol] = set()
    most_refused = min(MOST_REFUSED, max(1, most // 8))

    class LimitedConnection(uvicorns):  # type: ignore[misc]
        """One connection, see above."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self._headers_due = Timer(self.loop, header_seconds, self._abort)
            self._reading_due = Timer(self.loop, unread_seconds, self._abort)
            self._head = _Head()
            self._unparsed = bytearray()
            self._repeats_head = False
            self._behind_head: int | None = None
            self._unanswered: list[Any] = []

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Give a connection its place, if there is one."""
            self.transport = LingeringTransport(transport, self.loop, self._is_read, lingering)
            if len(self.connections) < most:
                super().connection_made(self.transport)
                self._headers_due.start()
                return
            nonlocal logged
            if time.monotonic() > logged + LOG_SECONDS:
                logged = time.monotonic()
                logger.error("all %d connections are in use; further ones are refused", most)
            self._head.is_whole = len(refused) >= most_refused
            refused.add(self)
            self.transport.write(busy)
            self.transport.close()

        def data_received(self, data: bytes) -> None:
            """Part of a request."""
            if self.transport.is_lingering:
                self.transport.drop(len(data))
                return
            if self.flow is None:  # it got no place
                return
            self._unparsed += data
            if len(self._unparsed) > max(UNPARSED_BYTES, len(data)):
                self._abort()
                return
            self._parse()

        def _parse(self) -> None:
            """Parse what has come, but no request behind one that waits already."""
            while self._unparsed and not self.pipeline and not self.transport.is_closing():
                part = bytes(self._unparsed[:PART_BYTES])
                del self._unparsed[:PART_BYTES]
                super().data_received(part)
                parsed, self._behind_head = self._behind_head, None
                if parsed is not None:
                    self._unparsed[:0] = part[parsed:]
                if self._head.parsed(len(part) if parsed is None else parsed):
                    self._refuse(too_long)
                    return
            if len(self._unparsed) > READ_AHEAD_BYTES:
                self.flow.pause_reading()
            if self.cycle is None or self.cycle.response_complete:
                self._headers_due.start()
            else:
                self._headers_due.stop()

        def send_400_response(self, msg: str) -> None:
            """It is no HTTP."""
            self._refuse(not_http)

        def _refuse(self, answer: bytes) -> None:
            """The last answer. Nothing is written into one that is on its way."""
            self._unparsed.clear()
            if any(cycle.response_started for cycle in self._unanswered):
                self._abort()
                return
            self._head.is_whole = False  # nobody knows how much is to come
            self._tell_unanswered()  # their answers would be dropped
            self.transport.write(answer)
            self.transport.close()

        def _tell_unanswered(self) -> None:
            """Nobody reads the answer of a request: uvicorn says so to the last one alone."""
            for cycle in self._unanswered:
                cycle.disconnected = True
                cycle.message_event.set()

        def _unsupported_upgrade_warning(self) -> None:
            """A request offers another protocol. Its parser takes what follows the head for that
            one, body included: another parser reads on, which is told how long the body is."""
            error: Any = sys.exception()
            self._behind_head = error.args[0]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            framing = (b"content-length", b"transfer-encoding")
            fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] in framing]
            self._repeats_head = True
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(fields))
            except httptools.HttpParserError:  # a body without an end
                self.send_400_response("")
            self._repeats_head = False

        def on_message_begin(self) -> None:
            """See uvicorn's."""
            if self._repeats_head:
                return
            self._head.begin()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            """See uvicorn's."""
            if not self._repeats_head:
                super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """One of a request's headers or trailers."""
            if self._repeats_head:
                return
            self._head.fields += 1
            if self._head.fields <= HEAD_FIELDS:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """The head is there; trailers may follow the body."""
            if self._repeats_head:
                return
            self._head.is_open = False
            if self._head.fields <= HEAD_FIELDS:
                super().on_headers_complete()
                self._unanswered.append(self.cycle)
                self.flow.resume_reading()  # uvicorn pauses it behind a request that waits

        def on_body(self, body: bytes) -> None:
            """Part of a body."""
            self._head.body += len(body)
            if self._head.fields <= HEAD_FIELDS:
                super().on_body(body)

        def on_message_complete(self) -> None:
            """A request is whole, unless its parser leaves the body to another protocol."""
            if self.parser.should_upgrade():
                return
            self._head.is_whole = True
            if self._head.fields <= HEAD_FIELDS:
                super().on_message_complete()

        def on_response_complete(self) -> None:
            """An answer has been written: the next request is parsed."""
            self._unanswered = [each for each in self._unanswered if not each.response_complete]
            super().on_response_complete()
            if self._unparsed and self.flow is not None:
                self.loop.call_soon(self._parse)

        def shutdown(self) -> None:
            """See uvicorn's: a client that has been answered is not waited for."""
            super().shutdown()
            if self.cycle is None or self.cycle.response_complete:
                self.transport.end()

        def _is_read(self) -> bool:
            return self._head.is_whole and not self._unparsed

        def pause_writing(self) -> None:
            """More of an answer waits than the client has read."""
            super().pause_writing()
            self._reading_due.start()

        def resume_writing(self) -> None:
            """Note that the client has read."""
            self._reading_due.stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            """Give the connection's place back."""
            self._headers_due.stop()
            self._reading_due.stop()
            refused.discard(self)
            self._tell_unanswered()
            super().connection_lost(exc)
            self.transport.end()

        def _abort(self) -> None:
            self._unparsed.clear()
            self.transport.abort()

    return LimitedConnection


class _Head:
    """What one request has beside its body: its line, headers, trailers, and a body's framing.
    ``is_whole``: nothing of it is to come."""

    def __init__(self) -> None:
        self.begin()
        self.is_whole = True

    def begin(self) -> None:
        """A request begins."""
        self.fields = 0
        self.raw = 0
        self.body = 0
        self.is_open = True
        self.is_whole = False

    def parsed(self, size: int) -> bool:
        """``size`` further bytes have been parsed; true if they are too many."""
        self.raw += size
        most = HEAD_BYTES if self.is_open else HEAD_BYTES + (1 + FRAMING) * self.body
        return self.fields > HEAD_FIELDS or self.raw > most + PART_BYTES


def _answer(status: int, said: str, code: str) -> bytes:
    response = json_response(error_body(status, said, code=code), status)
    response.headers["Connection"] = "close"
    lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
    phrase = http.HTTPStatus(status).phrase
    line = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return b"%b%b\r\n%b" % (line, b"".join(lines), bytes(response.body))
