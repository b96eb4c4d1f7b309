"""Starts the engine process, sees when it dies or freezes, and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from megatron_async import errors
from megatron_async.errors import EngineDeadError, MegatronAsyncError
from megatron_async.serving.messages import (
    Launch,
    NotStarted,
    Started,
    Stop,
    ToSupervisor,
)

logger = logging.getLogger(__name__)

RESTART_WINDOW_SECONDS = 600.0
"""Restarts longer ago than this are not counted."""
MOST_BACKOFF_SECONDS = 30.0
STOP_SECONDS = 10.0
"""For the process to end by itself before it is killed."""


class Supervisor:
    """One engine process after the other, in an event loop.

    Clients need not know it: their connection breaks when a process dies, and they find the next
    one under the same endpoint.

    Args:
        max_restarts: within :data:`RESTART_WINDOW_SECONDS`; then it is given up.
        heartbeat_timeout: seconds without a sign of life after which the process, once it serves,
            counts as frozen and is killed.
        backoff: seconds before the first restart; doubled for each further one.

    Attributes:
        state: "starting", "ready", or "dead": between two processes, given up, or stopped.
        gave_up: there will be no further process.
        starts: how many processes have been started.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        max_restarts: int = 3,
        heartbeat_timeout: float = 10.0,
        backoff: float = 0.5,
    ) -> None:
        self.state = "starting"
        self.gave_up = False
        self.starts = 0
        self._launch = launch
        self._max_restarts = max_restarts
        self._heartbeat_timeout = heartbeat_timeout
        self._backoff = backoff
        self._process: EngineHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._restarts: deque[float] = deque()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the engine process and wait until it serves.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to, such as a ConfigError.
            EngineDeadError: it died before it served.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine supervisor")
        await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """End the process, and remove its sockets."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.state, self.gave_up = "dead", True
        if self._process is not None:
            await self._process.end()
            self._process = None
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # somebody has got it
        if self._launch.endpoint.directory is not None:
            shutil.rmtree(self._launch.endpoint.directory, ignore_errors=True)

    async def _run(self) -> None:
        try:
            while True:
                said = await self._serve_once()
                self.state = "dead"
                first = self._ready is not None and not self._ready.done()
                if first or not self._may_restart():
                    break
                logger.error("%s; it is started again", said)
                await asyncio.sleep(self._pause())
                self.state = "starting"
            self.gave_up = True
            logger.error("%s; it is not started again", said)
            self._fail_start(EngineDeadError(str(said)))
        except asyncio.CancelledError:
            self._fail_start(EngineDeadError("the server is stopped"))
            raise
        except MegatronAsyncError as error:
            self.state, self.gave_up = "dead", True
            logger.error("the engine process cannot start: %s", error)
            self._fail_start(error)

    async def _serve_once(self) -> str:
        """One process from its start to its end; returns how it ended.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to.
        """
        self.starts += 1
        self._process = process = EngineHandle(self._launch)
        timeout: float | None = None  # a model may take long to load
        while True:
            try:
                async with asyncio.timeout(timeout):
                    message = await process.receive()
            except TimeoutError:
                if process.has_message():  # it was this process that stood still
                    continue
                await process.kill()
                return f"the engine process gave no sign of life for {timeout:g} seconds"
            if message is None:
                status = await process.kill()
                return f"the engine process has ended with status {status}"
            if isinstance(message, NotStarted):
                await process.kill()
                raise _error_of(message)
            timeout = self._heartbeat_timeout
            if isinstance(message, Started):
                self.state = "ready"
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True

    def _pause(self) -> float:
        doubled: float = self._backoff * 2 ** (len(self._restarts) - 1)
        return min(MOST_BACKOFF_SECONDS, doubled)

    def _fail_start(self, error: Exception) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)


class EngineHandle:
    """A running engine process.

    Args:
        launch: what it serves.
    """

    def __init__(self, launch: Launch) -> None:
        ours, theirs = socket.socketpair()
        package = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_async.serving.engine_process",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToSupervisor)
        self._received: asyncio.Queue[ToSupervisor | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._readable)
        self._send(launch)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def receive(self) -> ToSupervisor | None:
        """Its next message; None when it has died."""
        return await self._received.get()

    async def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self._connection.closed:
            return
        self._send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while await self.receive() is not None:
                    pass
        await self.kill()

    def abandon(self) -> int:
        """Hang up, as a supervisor that dies does, and wait; returns the exit status."""
        self._loop.call_soon_threadsafe(self._loop.remove_reader, self._connection.fileno())
        self._connection.close()
        return self._process.wait()

    async def kill(self) -> int:
        """Make sure that it is gone; returns its exit status."""
        if self._connection.closed:
            return self._process.wait()
        self._loop.remove_reader(self._connection.fileno())
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        self._connection.close()
        return status

    def has_message(self) -> bool:
        """A message has come, read by the event loop or not."""
        if not self._received.empty():
            return True
        return not self._connection.closed and self._connection.poll()

    def _send(self, message: Launch | Stop) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _readable(self) -> None:
        """A message is there, which its process has written in one go, or its end is."""
        try:
            self._received.put_nowait(self._decoder.decode(self._connection.recv_bytes()))
        except (EOFError, OSError, msgspec.MsgspecError):
            self._loop.remove_reader(self._connection.fileno())
            self._received.put_nowait(None)


def _error_of(message: NotStarted) -> MegatronAsyncError:
    """The error of this package that kept an engine from starting."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, MegatronAsyncError):
        return kind(message.message)
    return EngineDeadError(message.message)
