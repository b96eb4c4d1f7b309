"""The thread that steps an engine for all others, and sleeps when there is nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable

from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.engine.stepping.waiters import Waiters

Deliver = Callable[[], None]


class TokenStream:
    """The outputs of one request on their way to one coroutine of an event loop."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.failure: BaseException | None = None
        self._outputs: deque[TokenOutput] = deque()
        self._arrived = asyncio.Event()

    async def next(self) -> TokenOutput:
        """The next output, as soon as it is there; raises why there will be none."""
        while not self._outputs:
            if self.failure is not None:
                raise self.failure
            await self._arrived.wait()
            self._arrived.clear()
        return self._outputs.popleft()

    def put(self, outputs: Iterable[TokenOutput]) -> None:
        """Take outputs that have arrived; called in the event loop."""
        self._outputs.extend(outputs)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Learn that no output will arrive any more; called in the event loop."""
        self.failure = error
        self._arrived.set()


class StreamTable:
    """The streams of an engine. Each step wakes each event loop once, for all its streams.

    Attributes:
        streams: by the key of the request, for a look without a call.
    """

    def __init__(self) -> None:
        self.streams: dict[int, TokenStream] = {}
        self._lock = threading.RLock()  # a signal's handler may close the engine meanwhile

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def keys(self) -> frozenset[int]:
        """The keys of the requests that have a stream."""
        with self._lock:
            return frozenset(self.streams)

    def add(self, key: int, stream: TokenStream) -> None:
        """Outputs of ``stream.request_id`` go to ``stream``."""
        with self._lock:
            self.streams[key] = stream

    def remove(self, key: int) -> None:
        """Nobody waits for them any more."""
        with self._lock:
            self.streams.pop(key, None)

    def deliver(self, outputs: list[TokenOutput]) -> None:
        """Hand out what a step has brought."""
        with self._lock:
            streams = {stream.request_id: stream for stream in self.streams.values()}
        batches: dict[asyncio.AbstractEventLoop, dict[TokenStream, list[TokenOutput]]] = {}
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                batch = batches.setdefault(stream.loop, {})
                batch.setdefault(stream, []).append(output)
        for loop, batch in batches.items():
            _tell(loop, functools.partial(_put, batch))

    def fail(self, error: BaseException) -> None:
        """Fail all streams: no request will bring anything any more."""
        with self._lock:
            streams = list(self.streams.values())
        for stream in streams:
            _tell(stream.loop, functools.partial(stream.fail, error))


def _put(batch: dict[TokenStream, list[TokenOutput]]) -> None:
    for stream, outputs in batch.items():
        stream.put(outputs)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed, and nothing waits there
        loop.call_soon_threadsafe(call)


class EngineThread:
    """Runs ``step`` while there is something to do, and waits to be woken otherwise.

    Args:
        step: one step of the engine; an error in it ends the thread, and has stopped the engine.
        idle: nothing can go on until somebody asks for something. The caller that asks wakes
            ``waiters`` afterwards, so a wake-up between a look and the wait ends the wait.
        waiters: the threads that wait for the engine; this one is among them while it runs.
    """

    def __init__(
        self,
        step: Callable[[], None],
        idle: Callable[[], bool],
        waiters: Waiters,
    ) -> None:
        self._step = step
        self._idle = idle
        self._waiters = waiters
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_current(self) -> bool:
        """The caller runs in this thread: a callback."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End after the step that runs now; what is in flight stays there."""
        self._stopping = True
        self._waiters.wake()
        if wait and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        with self._waiters.waiter() as waiter:
            while not self._stopping:
                if self._idle():
                    waiter.wait()
                    continue
                try:
                    self._step()
                except Exception:  # the engine has stopped, and all waiters know
                    return
