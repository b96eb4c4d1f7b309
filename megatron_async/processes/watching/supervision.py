"""One process after the other: one that dies or freezes is started again, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_async.processes.child_process import ChildProcess
from megatron_async.processes.messages import Beat, NotStarted, Preparing, Started

START_SECONDS = 60.0
"""Without a sign of life of a process that starts: what it imports, loads or compiles may keep its
interpreter, and with it the thread that gives them, for many seconds."""
SHOWN_SECONDS = 5.0
"""After which a start says what it does, and again whenever it has gone on for twice as long."""
RESTART_WINDOW_SECONDS = 600.0
"""Restarts longer ago than this are not counted."""
MOST_BACKOFF_SECONDS = 30.0

logger = logging.getLogger(__name__)

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


class Supervision(Generic[Said]):
    """Keeps a process running, in an event loop.

    Args:
        name: of the process, for people.
        start: starts one.
        take: gets each message of it, but for signs of life, and for that which says why it cannot
            serve.
        ended: told of each that is gone.
        restarts: after the last one, or when a process has ended before it ever served, there is no
            further one.
        heartbeat_timeout: seconds without a message after which a process that serves counts as
            frozen and is killed; None waits for ever.
        start_timeout: likewise for one that starts.
        ending: when it is set, no process is started any more.

    Attributes:
        process: that which runs now; None between two.
        state: "starting", "ready", or "dead": between two processes, and behind the last.
        starts: how many processes have been started.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], ChildProcess[Said]],
        take: Callable[[Said], None],
        restarts: Restarts,
        *,
        ended: Callable[[ChildProcess[Said]], None] = lambda _: None,
        heartbeat_timeout: float | None = None,
        start_timeout: float | None = START_SECONDS,
        ending: asyncio.Event | None = None,
    ) -> None:
        self.process: ChildProcess[Said] | None = None
        self.state = "starting"
        self.starts = 0
        self._name = name
        self._start = start
        self._take = take
        self._restarts = restarts
        self._ended = ended
        self._heartbeat_timeout = heartbeat_timeout
        self._start_timeout = start_timeout
        self._ending = asyncio.Event() if ending is None else ending
        self._has_served = False

    async def run(self) -> str:
        """Wait until there is no process any more; returns why.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to.
        """
        while not self._ending.is_set():
            self.state = "starting"
            said = await self._serve_once()
            self.state = "dead"
            if self._ending.is_set():
                break
            pause = self._restarts.take() if self._has_served else None
            if pause is None:
                return f"{said}; it is not started again"
            logger.error("%s; it is started again", said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()
        return f"{self._name} was told to end"

    async def _serve_once(self) -> str:
        """One process from its start to its end; returns how it ended."""
        self.starts += 1
        process = self.process = self._start()
        said = await self._watch(process)
        self.process = None
        self._ended(process)
        return f"{self._name} {said}"

    async def _watch(self, process: ChildProcess[Said]) -> str:
        timeout, start = self._start_timeout, Start(self._name)
        while True:
            try:
                async with asyncio.timeout(timeout):
                    message = await process.receive()
            except TimeoutError:
                if process.has_message():  # it was this process that stood still
                    continue
                await process.kill()
                while_it = " while it started" if self.state == "starting" else ""
                return f"gave no sign of life for {timeout:g} seconds{while_it}"
            if message is None:
                return f"has ended with status {await process.kill()}"
            if isinstance(message, NotStarted):
                await process.kill()
                raise message.to_error()
            if isinstance(message, Started):
                self.state, self._has_served = "ready", True
                timeout = self._heartbeat_timeout
            elif isinstance(message, Preparing):
                timeout, start = self._start_timeout, Start(self._name)
            elif isinstance(message, Beat):
                if message.doing:
                    start.show(message.doing)
                continue
            self._take(message)


class Start:
    """What a process does while it starts, said in the log now and then where it takes long.

    Args:
        name: of the process.
        clock: seconds that never go back.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._began = clock()
        self._next = SHOWN_SECONDS

    def show(self, doing: str) -> None:
        """Note what the process does now."""
        seconds = self._clock() - self._began
        if seconds >= self._next:
            self._next = 2 * seconds
            logger.info("%s starts, for %.0f seconds now: it %s", self._name, seconds, doing)
