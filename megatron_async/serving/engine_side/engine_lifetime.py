"""From an engine's start to its end, while something serves with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class Engine(Protocol):
    """What is needed of ``Supervisor``."""

    async def start(self) -> None:
        """Start the engine process and wait until it serves; raises why it cannot."""

    async def given_up(self) -> str:
        """Wait until an engine that has served is not started again; why."""

    async def stop(self) -> None:
        """End it."""


class EngineUser(Protocol):
    """What serves with the engine: an ``EngineClient``, or several front ends."""

    async def ready(self) -> object:
        """Wait until the engine process has answered."""

    def give_up(self, reason: str) -> None:
        """There will be no further engine process."""


async def with_engine(
    engine: Engine,
    user: EngineUser,
    serving: Coroutine[Any, Any, None],
    end: Callable[[], None],
    *,
    stays: bool,
    on_ready: Callable[[], None],
) -> bool:
    """Start the engine, and stop it when ``serving`` is over; False when it was given up.

    Args:
        end: ends ``serving`` in good order.
        stays: do not end it when the engine is given up.
    """
    is_alive = True

    async def announce() -> None:
        await user.ready()
        on_ready()

    async def watch() -> None:
        nonlocal is_alive
        try:
            await engine.start()
        except BaseException:
            end()
            raise
        announcing = asyncio.create_task(announce())
        try:
            user.give_up(await engine.given_up())
        finally:
            announcing.cancel()
        is_alive = False
        if not stays:
            end()

    watching = asyncio.create_task(watch(), name="life of the engine")
    try:
        await serving
    finally:
        if not watching.done():
            watching.cancel()
            await asyncio.wait([watching])
        await engine.stop()
    if not watching.cancelled() and (error := watching.exception()) is not None:
        raise error
    return is_alive
