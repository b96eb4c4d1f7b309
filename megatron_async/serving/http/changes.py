"""Waiting for what other coroutines of the same event loop bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes all tasks that wait until something holds, so that none asks again and again.

    A waiter looks and begins to wait without giving up the event loop in between, so no change can
    fall between the two. The code that changes something that is waited for calls :meth:`tell`
    behind it, in the event loop's thread.
    """

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """Let all waiters look again."""
        told, self._next = self._next, None
        if told is not None:
            told.set_result(None)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until ``holds()`` is true, which may be now."""
        while not holds():
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next)  # a waiter that leaves leaves it to the others
