"""What the page at ``/`` shows, as server-sent events: ``GET /live``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from megatron_async.errors import EngineDeadError, RequestError
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.sse import event
from megatron_async.version import __version__

TICK_SECONDS = 0.5
"""Between two events: the engine process's own snapshots come as often."""
MOST_VIEWERS = 32


class LiveFeed:
    """One picture of the engine for all viewers of a front end, as long as there are any. A viewer
    that reads slowly misses some; nothing is kept for it.
    """

    def __init__(self, front: Frontend) -> None:
        self._front = front
        self._viewers = 0
        self._waiters: list[asyncio.Future[bytes | None]] = []
        self._task: asyncio.Task[None] | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """An event for each picture until the server is stopped.

        Each is whole: ``state`` of the engine, ``model``, ``version``, ``depth``, ``max_requests``,
        the last ``snapshot`` with ``time``, ``counters`` and ``gauges``, the ``device`` and the
        last ``steps`` (:meth:`LiveSteps.read
        <megatron_async.serving.engine_side.live_steps.LiveSteps.read>`),
        and of replicas ``replicas``: how many serve, and of how many. Numbers are then of all that
        serve, the device and the steps of one.

        Raises:
            ApiError: there are too many viewers.
        """
        if self._viewers >= MOST_VIEWERS:
            raise ApiError(429, f"{MOST_VIEWERS} viewers look already; try again later")
        loop = asyncio.get_running_loop()
        self._viewers += 1
        try:
            while True:
                if self._task is None:
                    self._task = loop.create_task(self._run(), name="live feed")
                waiter = loop.create_future()
                self._waiters.append(waiter)
                shown = await waiter
                if shown is None:
                    return
                yield shown
        finally:
            self._viewers -= 1

    async def _run(self) -> None:
        """Make pictures while there are viewers."""
        try:
            while True:
                self._show(event(await self._picture()))
                await asyncio.sleep(TICK_SECONDS)
                if not self._viewers or self._front.generator.draining:
                    return
        finally:
            self._task = None
            self._show(None)

    def _show(self, shown: bytes | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # else its viewer has left
                waiter.set_result(shown)

    async def _picture(self) -> dict[str, Any]:
        front = self._front
        client = front.generator.client
        shown: dict[str, Any] = {
            "state": client.state,
            "model": front.config.model_names[0],
            "version": __version__,
            "snapshot": client.snapshot and msgspec.structs.asdict(client.snapshot),
            "steps": [],
        }
        if states := client.states:
            shown["replicas"] = [sum(states.values()), len(states)]
        try:
            async with asyncio.timeout(TICK_SECONDS):
                info = await client.info()
                shown |= {"depth": info.depth, "max_requests": info.max_requests}
                shown |= await front.generator.command("live")
        except (EngineDeadError, RequestError, TimeoutError):
            pass  # the rest is known all the same
        return shown
