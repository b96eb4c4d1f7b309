"""The process that serves HTTP: a socket, uvicorn, and what a signal does to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI

from megatron_async.errors import ConfigError
from megatron_async.serving.app import make_app
from megatron_async.serving.connections import limited_connection, most_connections
from megatron_async.serving.frontend import Frontend

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
T = TypeVar("T")

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 65
"""For which an idle connection stays: longer than clients keep theirs, so that they close first."""
FIRST_CONTACT_SECONDS = 1.0
"""For which one of several front ends looks for the engine before it accepts: others can answer."""
ABORT_SECONDS = 5
"""For requests that were ended at a shutdown to send what they have."""


class Engine(Protocol):
    """What is needed of ``Supervisor``."""

    async def start(self) -> None:
        """Start the engine process and wait until it serves; raises why it cannot."""

    async def given_up(self) -> str:
        """Wait until an engine that has served is not started again; why."""

    async def stop(self) -> None:
        """End it."""


class Reached(Protocol):
    """What serves with the engine."""

    async def ready(self) -> object:
        """Wait until the engine process has answered."""

    def give_up(self, reason: str) -> None:
        """There will be no further engine process."""


class Connection(Reached, Protocol):
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
        on_exit: called in the event loop's thread when the server begins to end.
        has_signals: SIGTERM and SIGINT call :meth:`signalled`.
    """

    def __init__(
        self, config: uvicorn.Config, on_exit: Callable[[], None], *, has_signals: bool
    ) -> None:
        super().__init__(config)
        self._on_exit = on_exit
        self._has_signals = has_signals

    def signalled(self) -> None:
        """Stop accepting and let requests end; the second time do not wait for them."""
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """Stop accepting and let requests end."""
        if not self.should_exit:
            self.should_exit = True
            self._on_exit()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """See uvicorn's."""
        with super().capture_signals() if self._has_signals else contextlib.nullcontext():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn's, which would raise the signal again at the end."""
        self.signalled()


async def serve(
    front: Frontend,
    connection: Connection,
    engine: Engine,
    listening: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    tracer_provider: TracerProvider | None = None,
    listen: Callable[[Callable[[], None]], None] | None = None,
) -> bool:
    """Serve HTTP until a signal comes, or the engine cannot be started; False when it was given up,
    which ends the server as a signal does, unless it is to stay.

    Requests that run when a signal comes have ``shutdown_timeout`` seconds to end; then they end
    with the text that they have.

    Args:
        on_ready: called when the engine serves.
        tracer_provider: see ``make_app``.
        listen: gets what ends the server, to be called in the event loop in place of signals, which
            do nothing then.

    Raises:
        MegatronAsyncError: why the engine cannot be started.
    """
    loop = asyncio.get_running_loop()
    timeout = front.config.shutdown_timeout

    def drain() -> None:
        front.generator.draining = True
        # From within a signal's handler, which may have come between any two lines.
        loop.call_soon_threadsafe(loop.call_later, timeout, _spawn(front.generator.abort_all))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await connection.connect()
        if listen is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_CONTACT_SECONDS):
                    await connection.ready()
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
    server = HttpServer(config, drain, has_signals=listen is None)
    if listen is not None:
        listen(server.signalled)
    return await with_engine(
        engine,
        connection,
        server.serve(sockets=[listening]),
        server.end,
        stays=front.config.stays_without_engine,
        on_ready=on_ready,
    )


async def with_engine(
    engine: Engine,
    reached: Reached,
    serving: Coroutine[Any, Any, None],
    end: Callable[[], None],
    *,
    stays: bool,
    on_ready: Callable[[], None],
) -> bool:
    """Start the engine, and stop it when ``serving`` is over; False when it was given up.

    Args:
        end: ends ``serving`` in good order.
        stays: do not end it when the engine is given up.
    """
    is_alive = True

    async def announce() -> None:
        await reached.ready()
        on_ready()

    async def watch() -> None:
        nonlocal is_alive
        try:
            await engine.start()
        except BaseException:
            end()
            raise
        announcing = asyncio.create_task(announce())
        try:
            reached.give_up(await engine.given_up())
        finally:
            announcing.cancel()
        is_alive = False
        if not stays:
            end()

    watching = asyncio.create_task(watch(), name="life of the engine")
    try:
        await serving
    finally:
        if not watching.done():
            watching.cancel()
            await asyncio.wait([watching])
        await engine.stop()
    if not watching.cancelled() and (error := watching.exception()) is not None:
        raise error
    return is_alive


def run(work: Awaitable[T]) -> T:
    """Run :func:`serve` in uvloop's event loop where it is installed."""

    async def main() -> T:
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
