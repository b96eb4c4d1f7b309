"""Several front ends on one port, each in a process of its own (``--api-server-count``).

    parent: listening socket, supervisor       front end 0 .. N-1: HTTP        engine process
       |  starts, tells to end  |------------------>|<------- ZeroMQ ----------->|
       |------------------ starts, watches, starts again ---------------------->|

The parent serves no HTTP. It binds the socket, starts the engine process by the supervisor, and the
front ends, which are told over a pipe when to end and that the engine was given up. Signals are for
the parent alone; the others ignore them.

All front ends accept on one socket, which they inherit. So connections that nobody has accepted
outlive a front end that dies, a busy front end leaves them to the others, a second server on the
same port is an error, and macOS does as Linux. With ``SO_REUSEPORT`` none of that holds.

Each front end has its own connection to the engine process, with an identity of its own. Request
ids are a front end's own; the engine process counts sequences, holds ``--max-queue`` and carries
out ``/pause`` and its like for all. So any front end may be asked anything.

A front end that dies, or whose event loop stands still, is started again, each of them at most
``max_restarts`` times in ten minutes; after that the server ends with status 1. Its connections
break, and the engine process aborts its requests within a second. The others go on.

Counters and histograms of all front ends are in files, by prometheus_client's multiprocess mode,
and each ``/metrics`` shows their sums. The engine's own come from its snapshot, once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from megatron_async.errors import FrontEndDeadError
from megatron_async.processes import stop_signals
from megatron_async.processes.child_process import ChildProcess
from megatron_async.processes.messages import Beat, NotStarted, Started, Stop
from megatron_async.processes.watching.heartbeat import HEARTBEAT_SECONDS
from megatron_async.processes.watching.supervision import START_SECONDS, Restarts, Supervision
from megatron_async.serving.engine_side.engine_lifetime import Engine, with_engine
from megatron_async.serving.front_end.build import FrontendSettings
from megatron_async.serving.http.http_server import ABORT_SECONDS
from megatron_async.serving.messages import GivenUp

logger = logging.getLogger(__name__)

MODULE = "megatron_async.serving.front_end.front_end_process"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Is set before prometheus_client is imported, as its multiprocess mode needs."""
LATE_SECONDS = 10.0
"""For a front end to end beyond what its requests have; then it is killed."""


class FrontEndLaunch(msgspec.Struct, frozen=True, tag=True):
    """What a front end serves, and the descriptor of the socket on which it accepts."""

    settings: FrontendSettings
    listening: int


FromFrontEnd = Started | Beat | NotStarted
ToFrontEnd = FrontEndLaunch | GivenUp | Stop


class FrontEnds:
    """The front ends of a server, from the parent's view, in an event loop.

    Args:
        settings: of each, but for its ``metrics_directory``.
        listening: a bound socket.
        max_restarts, backoff: of each, see
            :class:`~megatron_async.processes.watching.supervision.Restarts`.
        heartbeat_timeout, start_timeout: see
            :class:`~megatron_async.processes.watching.supervision.Supervision`.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        listening: socket.socket,
        count: int,
        *,
        max_restarts: int = 3,
        backoff: float = 0.5,
        heartbeat_timeout: float | None = HEARTBEAT_SECONDS,
        start_timeout: float | None = START_SECONDS,
    ) -> None:
        self.config = settings.config
        assert settings.endpoint is not None
        self._endpoint = settings.endpoint
        self._metrics = Path(settings.endpoint.directory) / "metrics"
        self._settings = msgspec.structs.replace(settings, metrics_directory=str(self._metrics))
        self._listening = listening
        self._started: set[int] = set()
        self._all_started = asyncio.Event()
        self._ending = asyncio.Event()
        self._front_ends = [
            Supervision(
                f"front end {index}",
                self._start,
                partial(self._take, index),
                Restarts(max_restarts, backoff),
                ended=self._ended,
                heartbeat_timeout=heartbeat_timeout,
                start_timeout=start_timeout,
                ending=self._ending,
            )
            for index in range(count)
        ]
        self._given_up: GivenUp | None = None

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run now."""
        return [process.pid for process in self._processes]

    @property
    def _processes(self) -> list[ChildProcess[FromFrontEnd]]:
        return [each.process for each in self._front_ends if each.process is not None]

    async def run(self) -> None:
        """Serve until all have ended after :meth:`end`.

        Raises:
            FrontEndDeadError: one of them dies again and again.
            MegatronAsyncError: they cannot serve what they are asked to.
        """
        self._listening.listen()  # so that clients can connect before the first one accepts
        tasks = [asyncio.create_task(self._keep(each)) for each in self._front_ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self.end()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            for process in self._processes:
                await process.kill()
        for task in tasks:
            task.result()

    async def ready(self) -> None:
        """Wait until each of them has reached the engine."""
        await self._all_started.wait()

    def give_up(self, reason: str) -> None:
        """There will be no further engine process."""
        self._given_up = GivenUp(reason)
        self._tell(self._given_up)

    def signalled(self) -> None:
        """Do as a signal does: let requests end; the second time do not wait for them."""
        if self._ending.is_set():
            self._tell(Stop())
        self.end()

    def end(self) -> None:
        """Stop accepting and let requests end. Front ends that do not serve yet have none."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._listening.close()
        for each in self._front_ends:
            if each.process is not None and each.state == "starting":
                each.process.kill_now()
        self._tell(Stop())
        seconds = self.config.shutdown_timeout + ABORT_SECONDS + LATE_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._kill_all)

    def _tell(self, message: GivenUp | Stop) -> None:
        for process in self._processes:
            process.send(message)

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill_now()

    async def _keep(self, front_end: Supervision[FromFrontEnd]) -> None:
        said = await front_end.run()
        if not self._ending.is_set():
            raise FrontEndDeadError(said)

    def _take(self, index: int, message: FromFrontEnd) -> None:
        if not isinstance(message, Started):
            return
        self._started.add(index)
        if len(self._started) == len(self._front_ends):
            self._all_started.set()

    def _ended(self, process: ChildProcess[FromFrontEnd]) -> None:
        mark_process_dead(process.pid, self._metrics)

    def _start(self) -> ChildProcess[FromFrontEnd]:
        self._endpoint.prepare()
        self._metrics.mkdir(mode=0o700, exist_ok=True)
        descriptor = self._listening.fileno()
        process: ChildProcess[FromFrontEnd] = ChildProcess(
            MODULE,
            FromFrontEnd,
            FrontEndLaunch(self._settings, descriptor),
            inherited=[descriptor],
            environment={METRICS_VARIABLE: str(self._metrics)},
        )
        if self._given_up is not None:
            process.send(self._given_up)
        return process


async def serve_together(
    front_ends: FrontEnds, engine: Engine, *, on_ready: Callable[[], None] = lambda: None
) -> bool:
    """Do what ``http_server.serve`` does, by several processes.

    Raises:
        MegatronAsyncError: why the engine or a front end cannot be started.
    """
    stop_signals.listen(front_ends.signalled)
    try:
        return await with_engine(
            engine,
            front_ends,
            front_ends.run(),
            front_ends.end,
            stays=front_ends.config.stays_without_engine,
            on_ready=on_ready,
        )
    except FrontEndDeadError as error:
        logger.error("%s", error)
        return False
