"""Starts the engine process, sees when it dies or freezes, and starts it again."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from megatron_async.errors import EngineDeadError, MegatronAsyncError
from megatron_async.serving.child_process import ChildProcess, Restarts, error_of
from megatron_async.serving.messages import (
    Kept,
    Launch,
    NotStarted,
    Started,
    ToSupervisor,
)

logger = logging.getLogger(__name__)

ENGINE_MODULE = "megatron_async.serving.engine_process"
STOP_SECONDS = 10.0
"""For the process to end by itself before it is killed."""


class Supervisor:
    """One engine process after the other, in an event loop.

    Clients need not know it: their connection breaks when a process dies, and they find the next
    one under the same endpoint. It begins with what the last one was told and is to be
    :class:`~megatron_async.serving.messages.Kept`.

    Args:
        max_restarts, backoff: see :class:`~megatron_async.serving.child_process.Restarts`. After
            the last one it is given up.
        heartbeat_timeout: seconds without a sign of life after which the process, once it serves,
            counts as frozen and is killed.

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
        self._heartbeat_timeout = heartbeat_timeout
        self._restarts = Restarts(max_restarts, backoff)
        self._process: ChildProcess[ToSupervisor] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._given_up: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the engine process and wait until it serves.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to, such as a ConfigError.
            EngineDeadError: it died before it served.
        """
        loop = asyncio.get_running_loop()
        self._ready, self._given_up = loop.create_future(), loop.create_future()
        self._task = asyncio.create_task(self._run(), name="engine supervisor")
        await asyncio.shield(self._ready)

    async def given_up(self) -> str:
        """Wait until an engine that has served is given up; why. To be called after the start."""
        assert self._given_up is not None
        return await asyncio.shield(self._given_up)

    async def stop(self) -> None:
        """End the process, at once while it loads the model, and remove its sockets."""
        is_starting = self.state == "starting"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.state, self.gave_up = "dead", True
        if self._process is not None:
            await self._process.end(0.0 if is_starting else STOP_SECONDS)
            self._process = None
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # somebody has got it
        self._launch.endpoint.remove()

    async def _run(self) -> None:
        assert self._ready is not None
        try:
            while True:
                said = await self._serve_once()
                self.state = "dead"
                pause = self._restarts.take() if self._ready.done() else None
                if pause is None:
                    break
                logger.error("%s; it is started again", said)
                await asyncio.sleep(pause)
                self.state = "starting"
            self._give_up(f"{said}; it is not started again")
        except asyncio.CancelledError:
            self._fail_start(EngineDeadError("the server is stopped"))
            raise
        except Exception as error:  # of whatever kind: else the wait for the start has no end
            if not isinstance(error, (MegatronAsyncError, OSError)):
                logger.exception("unexpected error")
            self._give_up(f"the engine process cannot start: {error}", error)

    def _give_up(self, said: str, error: Exception | None = None) -> None:
        assert self._ready is not None and self._given_up is not None
        self.state, self.gave_up = "dead", True
        logger.error("%s", said)
        if self._ready.done():
            self._given_up.set_result(said)
        else:
            self._fail_start(
                error if isinstance(error, MegatronAsyncError) else EngineDeadError(said)
            )

    async def _serve_once(self) -> str:
        """One process from its start to its end; returns how it ended.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to.
        """
        self.starts += 1
        self._launch.endpoint.prepare()
        process: ChildProcess[ToSupervisor]
        self._process = process = ChildProcess(ENGINE_MODULE, ToSupervisor, self._launch)
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
                raise error_of(message)
            timeout = self._heartbeat_timeout
            if isinstance(message, Kept):
                self._launch = msgspec.structs.replace(self._launch, kept=message)
            if isinstance(message, Started):
                self.state = "ready"
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)

    def _fail_start(self, error: Exception) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
