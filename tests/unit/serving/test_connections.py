"""Connections that are too many, say nothing, do not read, or send a body too slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_async.serving.http import connections
from megatron_async.serving.http.connections import limited_connection, most_connections
from megatron_async.serving.http.errors import install_error_handlers
from megatron_async.serving.http.http_server import open_socket
from megatron_async.serving.http.middleware import BodyLimit
from megatron_async.serving.http.sse import EventStream
from tests.support.patience import PATIENCE_SECONDS

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
LONG = 10 * PATIENCE_SECONDS


async def says_ok(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything with "ok"."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def asks(self) -> bytes:
        """Send a request; the whole answer."""
        self.writer.write(REQUEST)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 2" in head
        return head + await self.reader.readexactly(2)

    async def is_closed(self) -> bytes:
        """Wait until the server has closed it; what it said before."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def running(app: ASGIApp = says_ok, most: int = 100, **limits: Any) -> AsyncIterator[int]:
    """uvicorn with limited connections; its port."""
    listening = open_socket("127.0.0.1", 0)
    listening.listen()  # who comes before uvicorn waits
    config = uvicorn.Config(
        app,
        http=limited_connection(most, **limits),
        ws="none",
        log_config=None,
        lifespan="off",
        timeout_keep_alive=int(LONG),
    )
    server = uvicorn.Server(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(listening))
        task = asyncio.create_task(server._serve([listening]))  # without a signal's handlers
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A connection to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_SECONDS))


def test_connections_beyond_the_limit_are_refused_and_others_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with running(most=2) as port, connected(port) as one:
            await one.asks()
            async with connected(port) as two:
                await two.asks()
                for _ in range(3):
                    async with connected(port) as third:
                        head, _, body = (await third.is_closed()).partition(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after" in head
                    assert json.loads(body)["error"]["code"] == "too_many_connections"
                await one.asks()
                await two.asks()
                two.writer.close()
            answer = b""
            while not answer.startswith(b"HTTP/1.1 200"):  # its place is free again
                async with connected(port) as next_one:
                    next_one.writer.write(
                        REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
                    )
                    answer = await next_one.is_closed()

    with caplog.at_level(logging.ERROR, connections.__name__):
        run(test())
    assert [record.getMessage() for record in caplog.records] == [
        "all 2 connections are in use; further ones are refused"
    ]


def test_a_connection_that_says_nothing_is_closed_and_a_kept_one_is_not() -> None:
    async def test() -> None:
        async with running(header_seconds=0.05) as port, connected(port) as kept:
            await kept.asks()
            async with connected(port) as silent:
                assert await silent.is_closed() == b""
            await kept.asks()

    run(test())


@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_headers_that_come_byte_by_byte_end_the_connection(before: bool) -> None:
    async def test() -> None:
        async with running(header_seconds=0.2) as port, connected(port) as slow:
            if before:
                await slow.asks()

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    slow.writer.write(b"GET / HTTP/1.1\r\nx: ")
                    while True:
                        slow.writer.write(b"x")
                        await slow.writer.drain()
                        await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert await slow.is_closed() == b""
            dripping.cancel()

    run(test())


def test_a_body_after_its_answer_does_not_keep_the_connection() -> None:
    async def test() -> None:
        async with running(header_seconds=0.05) as port, connected(port) as slow:
            slow.writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n")
            await slow.reader.readuntil(b"\r\n\r\nok")
            slow.writer.write(b"x")
            assert await slow.is_closed() == b""

    run(test())


def test_a_stream_that_nobody_reads_ends() -> None:
    async def test() -> None:
        ended, lines = asyncio.Event(), 0

        async def endless() -> AsyncGenerator[bytes, None]:
            nonlocal lines
            try:
                while True:
                    lines += 1
                    await asyncio.sleep(0)
                    yield b"x" * 65536
            finally:
                ended.set()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await EventStream(endless())(scope, receive, send)

        async with running(app, unread_seconds=0.2) as port, connected(port) as idle:
            idle.writer.write(REQUEST)
            await ended.wait()
            made = lines
            async with connected(port) as reads:  # more than the first, and for longer
                reads.writer.write(REQUEST)
                await reads.reader.readexactly(2 * made * 65536)

    run(test())


@pytest.mark.parametrize(
    ("limits", "most"),
    [((100, 20000), 20000 - 64), ((100, 100), 50), ((10, resource.RLIM_INFINITY), sys.maxsize)],
)
def test_some_files_are_left_to_others(
    limits: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: now.__setitem__(0, given))
    assert most_connections() == most
    assert now == [(limits[1], limits[1])]


# --- bodies ---------------------------------------------------------------------------------------


def reading_app(seconds: float) -> FastAPI:
    """Answers with the length of a body of at most 1000 bytes."""
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.post("/waits")
    async def waits(request: Request) -> str:
        await request.body()
        try:
            async with asyncio.timeout(10 * seconds):
                await request.receive()
        except TimeoutError:
            return "nothing came"
        return "something came"

    app.add_middleware(BodyLimit, most_bytes=1000, seconds=seconds)
    return app


def post(seconds: float = LONG, path: str = "/", **asked: Any) -> httpx.Response:
    async def test() -> httpx.Response:
        transport = httpx.ASGITransport(reading_app(seconds))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.post(path, **asked)

    return asyncio.run(test())


def asks(path: str) -> bytes:
    return REQUEST.replace(b" / ", b" /%b " % path.encode())


BROKEN = b"POST /broken HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nZ\r\n"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("ahead", [b"", asks("a"), asks("a") + asks("b") + asks("c"), BROKEN])
def test_a_request_is_told_that_nobody_waits_whatever_was_sent_behind_it(
    is_streamed: bool, ahead: bytes
) -> None:
    begun, left = asyncio.Event(), asyncio.Event()
    paths: list[str] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        if is_streamed:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def test() -> None:
        async with running(waits) as port, connected(port) as client:
            client.writer.write(asks("first"))
            await begun.wait()
            client.writer.write(ahead)
            await client.writer.drain()
            if ahead == BROKEN:  # nothing is written into an answer that is on its way
                said = await client.is_closed()
                assert (b" 400 " in said) is not is_streamed
                assert said.startswith(b"HTTP/1.1 200 ") is is_streamed
            else:
                client.writer.close()
            await left.wait()
        assert paths == ["/first"]

    run(test())


async def says_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body."""
    body = scope["path"].encode() + b":"
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


OFFERS = b"host: a\r\nconnection: Upgrade\r\nupgrade: %b\r\n"
OTHER = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
"""A request, where it is no body."""


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0, HTTP/2.0"])
@pytest.mark.parametrize(
    ("method", "framing", "body", "read"),
    [
        (b"POST", b"content-length: 35\r\n", OTHER, OTHER),
        (b"PUT", b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\n0\r\nx: y\r\n\r\n", b"abc"),
        (b"GET", b"", b"", b""),
        (b"POST", b"content-length: 0\r\n", b"", b""),
        (b"POST", b"content-length: 9000\r\n", b"b" * 9000, b"b" * 9000),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_request_that_offers_another_protocol_keeps_its_body(
    protocol: bytes, method: bytes, framing: bytes, body: bytes, read: bytes, size: int
) -> None:
    assert len(OTHER) == 35
    asked = method + b" /a HTTP/1.1\r\n" + OFFERS % protocol + framing + b"\r\n" + body
    sent = 2 * asked + b"GET /b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"

    async def test() -> None:
        async with running(says_body) as port, connected(port) as client:
            for start in range(0, len(sent), size):
                client.writer.write(sent[start : start + size])
                if size < 100 and start < 1000:
                    await client.writer.drain()
                    await asyncio.sleep(0)  # pieces arrive by themselves
            answers = await client.is_closed()
        bodies = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 ")[1:]]
        assert [part.partition(b" ")[0] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 3
        assert bodies == [b"/a:" + read] * 2 + [b"/b:"]

    run(test())


def test_a_body_without_an_end_is_refused_where_another_protocol_is_offered() -> None:
    asked = b"POST /a HTTP/1.1\r\n" + OFFERS % b"h2c" + b"transfer-encoding: gzip\r\n\r\nabc"

    async def test() -> None:
        async with running(says_body) as port, connected(port) as client:
            client.writer.write(asked)
            assert (await client.is_closed()).startswith(b"HTTP/1.1 400 ")

    run(test())


def test_a_body_that_comes_too_slowly_is_refused() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(LONG)

    answer = post(0.05, content=slow())
    assert answer.status_code == 408 and answer.headers["connection"] == "close"


def test_a_whole_body_has_no_time_limit() -> None:
    assert post(0.05, "/waits", content=b"x").json() == "nothing came"


def test_a_compressed_body_is_refused() -> None:
    answer = post(content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415 and "Content-Encoding" in answer.json()["error"]["message"]
    assert post(content=b"x", headers={"content-encoding": "identity"}).json() == 1
