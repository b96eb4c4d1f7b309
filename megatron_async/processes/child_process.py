"""A process that a coroutine starts and talks to."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from megatron_async.codec import Codec, encode
from megatron_async.processes.call import Call
from megatron_async.processes.child import EXIT_SECONDS, Child
from megatron_async.processes.messages import Stop

Said = TypeVar("Said")
BEATING = "megatron_async.processes.watching.beating"


class ChildProcess(Generic[Said]):
    """A :class:`~megatron_async.processes.child.Child` and what it says, for an event loop. It has
    a :class:`~megatron_async.processes.parent.Parent`.

    Args:
        module: of this package.
        said: type of the messages that it sends.
        launch: the first message that it gets.
        inherited, environment: see ``Child``.
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
        self._process = Child(BEATING, [module], inherited=inherited, environment=environment)
        self._call = Call(self._process.connection.detach())
        self._codec: Codec[Said] = Codec(said)
        self._received: asyncio.Queue[Said | None] = asyncio.Queue()
        self._has_hung_up = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._call.fileno(), self._readable)
        self.send(launch)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Nothing happens when it has died: :meth:`receive` says so."""
        self._call.say(encode(message))

    async def receive(self) -> Said | None:
        """Its next message; None when it has died."""
        return await self._received.get()

    async def end(self, seconds: float) -> int:
        """Ask it to end, and kill it if it takes longer; returns its exit status."""
        if not self._call.closed:
            self.send(Stop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while await self.receive() is not None:
                        pass
        return await self.kill()

    def kill_now(self) -> None:
        """Kill it; :meth:`receive` says when it is gone."""
        self._process.kill()

    async def kill(self) -> int:
        """Make sure that it is gone; returns its exit status."""
        if self._call.closed:
            return self._process.wait()
        self._loop.remove_reader(self._call.fileno())
        if self._has_hung_up:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        self._call.close()
        return status

    def has_message(self) -> bool:
        """A message has come, read by the event loop or not."""
        if not self._received.empty():
            return True
        return not self._call.closed and self._call.poll()

    def _readable(self) -> None:
        """A message is there, which its process has written in one go, or its end is."""
        try:
            self._received.put_nowait(self._codec.decode(self._call.recv_bytes()))
        except (EOFError, OSError, ValueError):
            self._loop.remove_reader(self._call.fileno())
            self._has_hung_up = True
            self._received.put_nowait(None)
