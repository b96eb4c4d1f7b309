"""Starts the engine process, sees when it dies or freezes, and starts it again."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from megatron_async.errors import EngineDeadError, MegatronAsyncError
from megatron_async.processes.child_process import ChildProcess
from megatron_async.processes.messages import Started
from megatron_async.processes.watching.heartbeat import HEARTBEAT_SECONDS
from megatron_async.processes.watching.supervision import START_SECONDS, Restarts, Supervision
from megatron_async.serving.messages import EngineInfo, Kept, Launch, ToSupervisor

logger = logging.getLogger(__name__)

ENGINE_MODULE = "megatron_async.serving.engine_side.engine_process"
STOP_SECONDS = 10.0
"""For the process to end by itself before it is killed."""


class Supervisor:
    """One engine process after the other, in an event loop.

    Clients need not know it: their connection breaks when a process dies, and they find the next
    one under the same endpoint. It begins with what the last one was told and is to be
    :class:`~megatron_async.serving.messages.Kept`.

    Args:
        max_restarts, backoff: see
            :class:`~megatron_async.processes.watching.supervision.Restarts`. After the last one it
            is given up.
        heartbeat_timeout, start_timeout: seconds without a sign of life after which the process,
            once it serves or while it starts, counts as frozen and is killed; None is never.

    Attributes:
        gave_up: there will be no further process.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        max_restarts: int = 3,
        heartbeat_timeout: float | None = HEARTBEAT_SECONDS,
        start_timeout: float | None = START_SECONDS,
        backoff: float = 0.5,
    ) -> None:
        self.gave_up = False
        self._launch = launch
        self._processes = Supervision(
            "the engine process",
            self._start,
            self._take,
            Restarts(max_restarts, backoff),
            heartbeat_timeout=heartbeat_timeout,
            start_timeout=start_timeout,
        )
        self._serves = asyncio.Event()
        self._failure: Exception | None = None
        """Why the first process cannot serve, or why there is no further one."""
        self._task: asyncio.Task[str] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now."""
        process = self._processes.process
        return None if process is None else process.pid

    @property
    def state(self) -> str:
        """ "starting", "ready", or "dead": between two processes, given up, or stopped."""
        return "dead" if self.gave_up else self._processes.state

    @property
    def starts(self) -> int:
        """How many processes have been started."""
        return self._processes.starts

    async def start(self) -> None:
        """Start the engine process and wait until it serves.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to, such as a ConfigError.
            EngineDeadError: it died before it served.
        """
        self._task = asyncio.create_task(self._run(), name="engine supervisor")
        serves = asyncio.create_task(self._serves.wait())
        try:
            await asyncio.wait([self._task, serves], return_when=asyncio.FIRST_COMPLETED)
        finally:
            serves.cancel()
        if not self._serves.is_set():
            raise self._failure or EngineDeadError("the server is stopped")

    async def given_up(self) -> str:
        """Wait until an engine that has served is given up; why. To be called after the start."""
        assert self._task is not None
        return await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End the process, at once while it loads the model, and remove its sockets."""
        is_starting = self.state == "starting"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.gave_up = True
        if self._processes.process is not None:
            await self._processes.process.end(0.0 if is_starting else STOP_SECONDS)
        self._launch.endpoint.remove()

    async def _run(self) -> str:
        """One process after the other; returns why there is no further one."""
        try:
            said = await self._processes.run()
            self._failure = EngineDeadError(said)
        except Exception as error:  # of whatever kind: else the wait for the start has no end
            if not isinstance(error, (MegatronAsyncError, OSError)):
                logger.exception("unexpected error")
            said = f"the engine process cannot start: {error}"
            is_ours = isinstance(error, MegatronAsyncError)
            self._failure = error if is_ours else EngineDeadError(said)
        self.gave_up = True
        logger.error("%s", said)
        return said

    def _start(self) -> ChildProcess[ToSupervisor]:
        self._launch.endpoint.prepare()
        return ChildProcess(ENGINE_MODULE, ToSupervisor, self._launch)

    def _take(self, message: ToSupervisor) -> None:
        if isinstance(message, Kept):
            self._launch = msgspec.structs.replace(self._launch, kept=message)
        if isinstance(message, EngineInfo):
            self._launch = msgspec.structs.replace(self._launch, info=message)
        if isinstance(message, Started):
            self._serves.set()
