"""Work that may take for ever, or all memory, in a process that can be stopped.

    python -m megatron_async.serving.front_end.limited_worker FD MODULE MIB

The module has ``make_worker(**given) -> Callable[..., value]``. Values on the way are msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from megatron_async.codec import Codec
from megatron_async.errors import MegatronAsyncError, RequestError
from megatron_async.processes.child import Child

LENGTH_BYTES = 8
MOST_IDLE = 2
"""Processes of a pool, each of which does one thing at a time."""
KILL_AFTER = 2
"""Times its limit, after which a process ends itself though nobody reads its answer."""


class Done(msgspec.Struct, frozen=True):
    """What a call gave, or the message of the RequestError that it raised."""

    value: Any = None
    error: str | None = None


ARGUMENTS: Codec[dict[str, Any]] = Codec(dict[str, Any])
DONE: Codec[Done] = Codec(Done)


class TooMuchError(MegatronAsyncError):
    """A call took too long, or too much memory."""


class LimitedWorkers:
    """Processes that make calls one after the other, within limits.

    Args:
        module: see above.
        given: arguments of its ``make_worker``.
        seconds: for which a call may run.
        mib: of memory that a process may take beyond what it has when it starts.
    """

    def __init__(
        self, module: str, given: Mapping[str, Any], *, seconds: float, mib: int = 512
    ) -> None:
        self._module = module
        self._given = dict(given)
        self._seconds = seconds
        self._mib = mib
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(MOST_IDLE)
        self._is_closed = False

    async def call(self, **arguments: Any) -> Any:
        """What the function gives.

        Raises:
            RequestError: it raised one, or an argument has an integer beyond 64 bits.
            TooMuchError: it took too long, or too much memory. Its process is gone.
        """
        try:
            message = ARGUMENTS.encode(arguments)
        except OverflowError:
            large = next(name for name, value in arguments.items() if _overflows(value))
            raise RequestError(f"{large}: an integer does not fit into 64 bits") from None
        async with self._places:
            process = await self._living()
            try:
                async with asyncio.timeout(self._seconds):
                    done = await process.call(message)
            except TimeoutError:
                process.kill()
                raise TooMuchError(f"it runs for more than {self._seconds:g} s") from None
            except (EOFError, ConnectionError):
                process.kill()
                said = f"it takes more than {self._mib} MiB, or ended its process"
                raise TooMuchError(said) from None
            except BaseException:  # nobody waits for its answer any more
                process.kill()
                raise
        if self._is_closed:
            process.kill()
        else:
            self._idle.append(process)
        if done.error is not None:
            raise RequestError(done.error)
        return done.value

    async def _living(self) -> _Process:
        """One that waits, or a new one: somebody may have ended what waits."""
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
            process.kill()
        process = await _Process.start(self._module, self._mib)
        try:
            await process.call(ARGUMENTS.encode({**self._given, "seconds": self._seconds}))
        except (EOFError, ConnectionError):
            process.kill()
            raise TooMuchError("its process does not start; the log says why") from None
        except BaseException:
            process.kill()
            raise
        return process

    def close(self) -> None:
        """End the processes that do nothing; those that work end with their calls."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().kill()


class _Process:
    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str, mib: int) -> _Process:
        child = Child(__name__, [module, str(mib)])
        child.connection.setblocking(False)
        return cls(child, *await asyncio.open_connection(sock=child.connection))

    async def call(self, message: bytes) -> Done:
        self._writer.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        return DONE.decode(await self._reader.readexactly(size))

    @property
    def lives(self) -> bool:
        return self._child.poll() is None

    def kill(self) -> None:
        self._writer.transport.abort()
        self._child.kill()
        self._child.lifeline.close()
        with contextlib.suppress(ChildProcessError):
            self._child.wait()


# --- the other side -------------------------------------------------------------------------------


def _limit_memory(mib: int) -> None:
    import resource

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    size = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def serve(connection: socket.socket, make: Callable[..., Callable[..., Any]], mib: int) -> None:
    """Make calls until the other side hangs up."""
    import signal

    stream = connection.makefile("rwb")
    work: Callable[..., Any] | None = None
    seconds = 0.0
    while size := stream.read(LENGTH_BYTES):
        arguments = ARGUMENTS.decode(stream.read(int.from_bytes(size, "big")))
        value: Any = None
        error = None
        if work is None:
            seconds = arguments.pop("seconds")
            work = make(**arguments)
            if sys.platform == "linux":
                _limit_memory(mib)
        else:
            signal.setitimer(signal.ITIMER_REAL, KILL_AFTER * seconds)
            try:
                value = work(**arguments)
            except RequestError as raised:
                error = str(raised)
            except MemoryError:
                return  # the other side knows what that means
            signal.setitimer(signal.ITIMER_REAL, 0)
        message = DONE.encode(Done(value, error))
        stream.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        stream.flush()


def main() -> None:
    """Run the process."""
    descriptor, module, mib = sys.argv[1:]
    made = importlib.import_module(module).make_worker
    with socket.socket(fileno=int(descriptor)) as connection:
        serve(connection, made, int(mib))


if __name__ == "__main__":
    main()


def _overflows(value: Any) -> bool:
    try:
        ARGUMENTS.encode(value)
    except OverflowError:
        return True
    return False
