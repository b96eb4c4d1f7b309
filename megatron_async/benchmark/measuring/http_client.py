"""A client of OpenAI's streams that costs little: it shares the host with the server it measures.

httptools parses HTTP in an asyncio protocol, and msgspec the events. Nothing is woken for an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from megatron_async.errors import ConfigError

ERROR_CHARACTERS = 200
DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """What came of a request; times in seconds of ``time.perf_counter``.

    Attributes:
        due: when it was to be sent.
        times: of each event with tokens.
        ended: when the answer was over.
        tokens: by the server's usage, else by token ids, else one for each event.
        error: the kind of error, with what the server said; None when all came.
    """

    due: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    error: tuple[str, str] | None = None


class EventParser:
    """Reads the events of a stream, cut into pieces at any byte, into an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._ids = 0
        self.is_done = False

    def push(self, body: bytes) -> None:
        """The next bytes; raises msgspec.MsgspecError for what is no event of OpenAI's API."""
        now = time.perf_counter()
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        answer = self._answer
        if data == DONE:
            self.is_done = True
            return
        event = _decode(data)
        for choice in event.choices:
            delta = choice.delta
            # A chat's first event has a role alone.
            if delta is None or delta.content or delta.reasoning_content:
                answer.times.append(now)
                self._ids += len(choice.token_ids or ())
        if event.usage is not None:
            answer.tokens = event.usage.completion_tokens
        elif event.choices:
            answer.tokens = self._ids or len(answer.times)
        if event.error is not None:
            answer.error = ("error event", str(event.error)[:ERROR_CHARACTERS])


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._events: EventParser | None = None
        self._status = 0
        self._refusal = b""
        self._misread: msgspec.MsgspecError | None = None
        self._ended: asyncio.Future[tuple[str, str] | None] | None = None
        self._is_answered = False
        self.is_open = False

    async def ask(self, request: bytes, answer: Answer) -> bool:
        """Send a request and fill in its answer; False when nothing came, for the server had closed
        the connection after the last one."""
        was_used, self._is_answered = self._parser is not None, False
        self._parser = httptools.HttpResponseParser(self)
        self._events = EventParser(answer)
        self._status, self._refusal, self._misread = 0, b"", None
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        error = await self._ended
        answer.ended = time.perf_counter()
        answer.error = error or answer.error
        return self._is_answered or not was_used

    def close(self) -> None:
        """Nothing more is asked."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio's ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._is_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            # What a callback raises comes as an error of the parser.
            self._end(("not understood", str(self._misread or error)))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.is_open = False
        if self._events is not None and self._events.is_done:
            self._end(None)
        self._end(("cut off", str(exc or "the server closed the connection")))

    # --- httptools' ---------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self._status == 200 and self._events is not None:
            try:
                self._events.push(body)
            except msgspec.MsgspecError as error:
                self._misread = error
                raise
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        """See httptools."""
        self.is_open = self._parser.should_keep_alive()
        if self._status != 200:
            said = self._refusal.decode(errors="replace")[:ERROR_CHARACTERS]
            self._end((f"HTTP {self._status}", said))
        elif self._events is None or not self._events.is_done:
            self._end(("cut off", "the stream has no [DONE]"))
        else:
            self._end(None)

    def _end(self, error: tuple[str, str] | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)


class Server:
    """Where requests go.

    Args:
        url: of the server, with or without /v1.
        key: sent with each request; "" for none.

    Raises:
        ConfigError: that is no URL of a server.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--server {url}: give a URL such as http://127.0.0.1:5000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._is_https = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_https else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._head += f"Authorization: Bearer {key}\r\n" if key else ""

    def post(self, path: str, body: Any) -> bytes:
        """The bytes of a request."""
        content = msgspec.json.encode(body)
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    async def connect(self) -> Connection:
        """A new connection; raises OSError."""
        loop = asyncio.get_running_loop()
        secure: Any = {"ssl": True} if self._is_https else {}
        made = await loop.create_connection(Connection, self._host, self._port, **secure)
        return made[1]


async def send_all(
    server: Server,
    requests: Sequence[bytes],
    arrived: Sequence[float],
    concurrency: int,
    on_end: Callable[[Answer], None],
) -> list[Answer]:
    """The answers to all requests, ``arrived`` seconds after now each, in order; as many streams at
    once as ``concurrency``. A request that arrives while all are busy waits, and the time counts.
    Requests that are all there at once are due when a stream is free.
    """
    begin = time.perf_counter()
    answers: list[Answer] = []
    left = iter(zip(requests, arrived, strict=True))

    async def work(left: Iterator[tuple[bytes, float]]) -> None:
        connection: Connection | None = None
        for request, arrives in left:
            due = begin + arrives
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answer = Answer(due if arrives else time.perf_counter())
            answers.append(answer)
            try:
                if connection is None or not connection.is_open:
                    connection = await server.connect()
                if not await connection.ask(request, answer):
                    answer.error, connection = None, await server.connect()
                    await connection.ask(request, answer)
            except OSError as error:
                answer.ended, answer.error = time.perf_counter(), ("no connection", str(error))
            on_end(answer)
        if connection is not None:
            connection.close()

    await asyncio.gather(*(work(left) for _ in range(min(concurrency, len(requests)))))
    return answers
