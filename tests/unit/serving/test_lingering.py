"""A client that still sends when its last answer is written can read it, within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from megatron_async.serving.http.lingering import Bounds
from tests.support.patience import PATIENCE_SECONDS
from tests.unit.serving.test_connections import (
    LONG,
    REQUEST,
    Client,
    connected,
    reading_app,
    running,
)

MIB = 1 << 20
BODY_BYTES = 15 * MIB
"""More than the buffers of two sockets hold."""
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
DECLARED = POST + b"content-length: %d\r\n\r\n" % BODY_BYTES
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % BODY_BYTES


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in an event loop of either kind."""

    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(test, PATIENCE_SECONDS))

    return run


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 401, as without a key, and closes."""
    headers = [(b"content-length", b"2"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


async def whole_answer(client: Client, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to what is sent, read when all is sent."""
    client.writer.write(sent)
    for _ in range(0, BODY_BYTES, MIB):
        client.writer.write(bytes(MIB))
        await client.writer.drain()
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


SENT = {
    "before the body": (refuses, DECLARED, 401),
    "by its declared length": (reading_app(LONG), DECLARED, 413),
    "within the body": (reading_app(LONG), CHUNKED, 413),
    "by its head": (refuses, POST + b"x: " + b"y" * MIB, 431),
    "as no HTTP": (refuses, b"\0", 400),
}


@pytest.mark.parametrize("name", SENT)
def test_a_request_that_is_refused_can_be_sent_to_its_end(name: str, run: Run) -> None:
    app, first, status = SENT[name]

    async def test() -> None:
        async with running(app) as port, connected(port) as client:
            found, body = await whole_answer(client, first)
            assert found == status and (body == b"no" or json.loads(body)["error"])

    run(test())


def test_a_connection_that_gets_no_place_can_send_its_request(run: Run) -> None:
    async def test() -> None:
        async with running(refuses, most=0) as port, connected(port) as client:
            status, body = await whole_answer(client, DECLARED)
            assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"

    run(test())


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_a_whole_request_is_not_waited_for(close: bytes, run: Run) -> None:
    async def test() -> None:
        never = Bounds(seconds=LONG, idle_seconds=LONG)
        async with running(refuses, lingering=never) as port, connected(port) as client:
            client.writer.write(POST + close + b"content-length: 1\r\n\r\na")
            assert await client.is_closed()
            with pytest.raises(ConnectionError):
                await sends_on(client)

    run(test())


async def sends_on(client: Client, pause: float = 0.0) -> None:
    """Send until nobody takes it any more."""
    while True:
        client.writer.write(bytes(1024))
        await client.writer.drain()
        await asyncio.sleep(pause)


BOUNDS = {
    "bytes": (Bounds(most_bytes=MIB, seconds=LONG, idle_seconds=LONG), 0.0),
    "time": (Bounds(seconds=0.2, idle_seconds=LONG), 0.01),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_never_ends_is_dropped_within_bounds(name: str, run: Run) -> None:
    bounds, pause = BOUNDS[name]

    async def test() -> None:
        async with running(refuses, lingering=bounds) as port, connected(port) as client:
            client.writer.write(DECLARED)
            with pytest.raises(ConnectionError):
                await sends_on(client, pause)

    run(test())


def test_a_client_that_says_nothing_more_gives_its_place_back(run: Run) -> None:
    async def test() -> None:
        idle = Bounds(idle_seconds=0.05)
        async with running(refuses, most=1, lingering=idle) as port, connected(port) as silent:
            silent.writer.write(DECLARED)
            assert await silent.is_closed()
            answer = b""
            while not answer.startswith(b"HTTP/1.1 401 "):
                async with connected(port) as other:
                    other.writer.write(REQUEST)
                    answer = await other.is_closed()

    run(test())


@pytest.mark.parametrize("sent", [DECLARED, DECLARED + b"a", POST])
def test_a_server_that_stops_waits_for_nobody_it_has_answered(sent: bytes, run: Run) -> None:
    async def test() -> None:
        never = Bounds(seconds=LONG, idle_seconds=LONG)
        async with running(refuses, lingering=never) as port, connected(port) as client:
            client.writer.write(sent)
            if sent != POST:
                assert await client.is_closed()

    run(test())
