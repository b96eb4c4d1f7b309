"""Processes that another one of the server starts, talks to and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from megatron_async import errors
from megatron_async.codec import Codec, encode
from megatron_async.errors import EngineDeadError, MegatronAsyncError
from megatron_async.lifeline import Child
from megatron_async.serving.messages import NotStarted, Stop

RESTART_WINDOW_SECONDS = 600.0
"""Restarts longer ago than this are not counted."""
MOST_BACKOFF_SECONDS = 30.0
EXIT_SECONDS = 5.0
"""For a process that has hung up to say its exit status."""

Said = TypeVar("Said")


class Restarts:
    """How often something may be started again, and how long to wait before.

    Args:
        most: within :data:`RESTART_WINDOW_SECONDS`.
        backoff: seconds before the first restart; doubled for each further one.
    """

    def __init__(self, most: int, backoff: float) -> None:
        self._most = most
        self._backoff = backoff
        self._times: deque[float] = deque()

    def take(self) -> float | None:
        """Count one more: seconds to wait before it; None when it is one too many."""
        now = time.monotonic()
        while self._times and self._times[0] < now - RESTART_WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        self._times.append(now)
        doubled: float = self._backoff * 2 ** (len(self._times) - 1)
        return min(MOST_BACKOFF_SECONDS, doubled)


class ChildProcess(Generic[Said]):
    """A running ``python -m MODULE FD`` that ends with this process, and the connection to its
    :class:`~megatron_async.serving.parent_process.Parent`.

    Args:
        module: of this package.
        said: type of the messages that it sends.
        launch: the first message that it gets.
        inherited: descriptors that it keeps, under the same numbers.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        module: str,
        said: Any,
        launch: msgspec.Struct,
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = Child(
                module,
                [str(theirs.fileno())],
                inherited=[theirs.fileno(), *inherited],
                environment=environment,
            )
        self._connection = Connection(ours.detach())
        self._codec: Codec[Said] = Codec(said)
        self._received: asyncio.Queue[Said | None] = asyncio.Queue()
        self._has_hung_up = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._readable)
        self.send(launch)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Nothing happens when it has died: :meth:`receive` says so."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(message))

    async def receive(self) -> Said | None:
        """Its next message; None when it has died."""
        return await self._received.get()

    async def end(self, seconds: float) -> int:
        """Ask it to end, and kill it if it takes longer; returns its exit status."""
        if not self._connection.closed:
            self.send(Stop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while await self.receive() is not None:
                        pass
        return await self.kill()

    def abandon(self) -> int:
        """Hang up, and wait for the process to end by itself; returns the exit status."""
        self._loop.call_soon_threadsafe(self._loop.remove_reader, self._connection.fileno())
        self._connection.close()
        return self._process.wait()

    def kill_now(self) -> None:
        """Kill it; :meth:`receive` says when it is gone."""
        self._process.kill()

    async def kill(self) -> int:
        """Make sure that it is gone; returns its exit status."""
        if self._connection.closed:
            return self._process.wait()
        self._loop.remove_reader(self._connection.fileno())
        if self._has_hung_up:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        self._connection.close()
        return status

    def has_message(self) -> bool:
        """A message has come, read by the event loop or not."""
        if not self._received.empty():
            return True
        return not self._connection.closed and self._connection.poll()

    def _readable(self) -> None:
        """A message is there, which its process has written in one go, or its end is."""
        try:
            self._received.put_nowait(self._codec.decode(self._connection.recv_bytes()))
        except (EOFError, OSError, ValueError):
            self._loop.remove_reader(self._connection.fileno())
            self._has_hung_up = True
            self._received.put_nowait(None)


def error_of(message: NotStarted) -> MegatronAsyncError:
    """The error of this package that kept a process from starting."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, MegatronAsyncError):
        return kind(message.message)
    return EngineDeadError(message.message)
