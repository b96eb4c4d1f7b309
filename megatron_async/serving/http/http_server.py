"""The process that serves HTTP: a socket, uvicorn, and what a signal does to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI

from megatron_async.errors import ConfigError, EngineDeadError
from megatron_async.processes import stop_signals
from megatron_async.processes.garbage import keep_all
from megatron_async.serving.engine_side.engine_lifetime import Engine, EngineUser, with_engine
from megatron_async.serving.http.app import Lifespan, make_app
from megatron_async.serving.http.connections import limited_connection, most_connections
from megatron_async.serving.http.frontend import Frontend

if TYPE_CHECKING:
    from megatron_async.serving.tracing.export import ServerTracerProvider
T = TypeVar("T")

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 65
"""For which an idle connection stays: longer than clients keep theirs, so that they close first."""
FIRST_CONTACT_SECONDS = 1.0
"""For which one of several front ends looks for the engine before it accepts: others can answer."""
FORCED_SECONDS = 1.0
"""For requests that are cut short, because nobody waits for them, to notice it."""
ABORT_SECONDS = 5
"""For requests that were ended at a shutdown to send what they have."""


class Connection(EngineUser, Protocol):
    """What is needed of ``EngineClient`` to open and close it."""

    async def connect(self) -> None:
        """Begin to look for the engine process."""

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

    Args:
        on_exit: called in the event loop when the server begins to end.
    """

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def signalled(self) -> None:
        """Stop accepting and let requests end; the second time do not wait for them."""
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """Stop accepting and let requests end."""
        if not self.should_exit:
            self.should_exit = True
            self._on_exit()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn's, which leaves the application open where it does not wait for requests.
        Closing it ends them."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=FORCED_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals call :meth:`signalled` already; uvicorn would raise them again."""
        yield


async def serve(
    front: Frontend,
    connection: Connection,
    engine: Engine,
    listening: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    tracer_provider: ServerTracerProvider | None = None,
    listen: Callable[[Callable[[], None]], None] = stop_signals.listen,
    waits: bool = False,
) -> bool:
    """Serve HTTP until a signal comes, or the engine cannot be started; False when it was given up,
    which ends the server as a signal does, unless it is to stay.

    Requests that run when a signal comes have ``shutdown_timeout`` seconds to end; then they end
    with the text that they have.

    Args:
        on_ready: called when the engine serves.
        tracer_provider: see ``make_app``; it exports its last spans at the end.
        listen: gets what ends the server, to be called in the event loop.
        waits: for the engine, for a moment, before connections are accepted.

    Raises:
        MegatronAsyncError: why the engine cannot be started.
    """
    loop = asyncio.get_running_loop()
    timeout = front.config.shutdown_timeout

    def drain() -> None:
        front.generator.draining = True
        loop.call_later(timeout, _spawn(front.generator.abort_all))

    lifespan = connected(connection, waits=waits, tracer_provider=tracer_provider)
    app = make_app(front, lifespan=lifespan, tracer_provider=tracer_provider)
    server = HttpServer(_uvicorn_config(app, timeout), drain)
    listen(server.signalled)
    return await with_engine(
        engine,
        connection,
        server.serve(sockets=[listening]),
        server.end,
        stays=front.config.stays_without_engine,
        on_ready=on_ready,
    )


def connected(
    connection: Connection, *, waits: bool, tracer_provider: ServerTracerProvider | None = None
) -> Lifespan:
    """Open and close the way to the engine; ``waits`` for it a moment before connections are
    accepted. Then ``tracer_provider`` exports its last spans."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await connection.connect()
        if waits:
            with contextlib.suppress(TimeoutError, EngineDeadError):  # it says so to its clients
                async with asyncio.timeout(FIRST_CONTACT_SECONDS):
                    await connection.ready()
        try:
            yield
        finally:
            await connection.aclose()
            if tracer_provider is not None:
                await tracer_provider.finish()

    return lifespan


def _uvicorn_config(app: FastAPI, shutdown_timeout: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(shutdown_timeout) + ABORT_SECONDS,
        backlog=BACKLOG,
        http=limited_connection(most_connections()),
        ws="none",
    )


def run(work: Awaitable[T]) -> T:
    """Run :func:`serve` in uvloop's event loop where it is installed."""

    async def main() -> T:
        keep_all()
        return await work

    factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def _spawn(work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    tasks: set[asyncio.Future[None]] = set()

    def begin() -> None:
        task = asyncio.ensure_future(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return begin
