"""The process that serves HTTP: a socket, uvicorn, and what a signal does to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn
from fastapi import FastAPI

from megatron_async.errors import ConfigError
from megatron_async.serving.app import make_app
from megatron_async.serving.connections import limited_connection, most_connections
from megatron_async.serving.frontend import Frontend

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 65
"""For which an idle connection stays: longer than clients keep theirs, so that they close first."""
ABORT_SECONDS = 5
"""For requests that were ended at a shutdown to send what they have."""


class Engine(Protocol):
    """What is needed of ``Supervisor``."""

    async def start(self) -> None:
        """Start the engine process and wait until it serves; raises why it cannot."""

    async def stop(self) -> None:
        """End it."""


class Connection(Protocol):
    """What is needed of ``EngineClient`` to open and close it."""

    async def connect(self) -> None:
        """Begin to look for the engine process."""

    async def ready(self) -> object:
        """Wait until the engine process has answered."""

    async def aclose(self) -> None:
        """Abort what is in progress and leave."""


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 is one that the system chooses.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio turns Nagle's algorithm off only where the protocol is said: else each answer of
        # more than one write waits 40 ms for an acknowledgement.
        opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"host={host!r}: {error.strerror}; choose another") from None
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"{host}:{port} cannot be used: {error.strerror}; choose another"
        ) from None
    opened.setblocking(False)
    return opened


def url_of(listening: socket.socket) -> str:
    """Where a socket of :func:`open_socket` is to be found."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn, whose end by a signal is a success.

    The first SIGTERM or SIGINT stops accepting; ``on_exit`` is called in the event loop's thread.
    A second SIGINT does not wait for requests.
    """

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn's, which would raise the signal again at the end."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._on_exit()


async def serve(
    front: Frontend,
    connection: Connection,
    engine: Engine,
    listening: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Serve HTTP until a signal comes, or the engine cannot be started.

    Requests that run when a signal comes have ``shutdown_timeout`` seconds to end; then they end
    with the text that they have.

    Args:
        on_ready: called when the engine serves.
        tracer_provider: see ``make_app``.

    Raises:
        MegatronAsyncError: why the engine cannot be started.
    """
    loop = asyncio.get_running_loop()
    timeout = front.config.shutdown_timeout
    starting: asyncio.Task[None] | None = None

    def drain() -> None:
        front.generator.draining = True
        # From within a signal's handler, which may have come between any two lines.
        loop.call_soon_threadsafe(loop.call_later, timeout, _spawn(front.generator.abort_all))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await connection.connect()
        try:
            yield
        finally:
            await connection.aclose()

    config = uvicorn.Config(
        make_app(front, lifespan=lifespan, tracer_provider=tracer_provider),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(timeout) + ABORT_SECONDS,
        backlog=BACKLOG,
        http=limited_connection(most_connections()),
        ws="none",
    )
    server = HttpServer(config, drain)

    async def start() -> None:
        try:
            await engine.start()
            await connection.ready()
        except BaseException:
            server.should_exit = True
            raise
        on_ready()

    try:
        starting = asyncio.create_task(start(), name="start of the engine")
        await server.serve(sockets=[listening])
    finally:
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        await engine.stop()
    if not starting.cancelled() and (error := starting.exception()) is not None:
        raise error


def run(work: Awaitable[None]) -> None:
    """Run :func:`serve` in uvloop's event loop where it is installed."""

    async def main() -> None:
        await work

    factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def _spawn(work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    tasks: set[asyncio.Future[None]] = set()

    def begin() -> None:
        task = asyncio.ensure_future(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return begin
