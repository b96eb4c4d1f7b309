"""Threads that wait for an engine, and how they are woken without a poll."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager


class Waiter:
    """One thread that waits. A wake-up that comes before the wait ends the wait at once, so it
    cannot fall between a look at what is waited for and :meth:`wait`."""

    def __init__(self) -> None:
        # Not an event: a signal's handler that interrupts its ``set`` would deadlock in another.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self) -> None:
        """Block until :meth:`wake` has been called since the last wait."""
        self._wakes.get()

    def wake(self, *_: object) -> None:
        """End this wait, or the next one. A signal's handler may call it anywhere."""
        # A token that is there has not been taken: the waiter that takes it looks after this.
        if self._wakes.empty():
            self._wakes.put(None)


class Waiters:
    """All threads that wait for one engine. Each has a token of its own, so that none takes the
    wake-up of another.

    Attributes:
        waiting: the waiters. None need be woken while there are none: one that comes looks around
            before it waits.
    """

    def __init__(self) -> None:
        # Single calls of a dict are atomic: a signal's handler may come between any two of them.
        self.waiting: dict[int, Waiter] = {}

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """A waiter that :meth:`wake` wakes while this is entered."""
        waiter = Waiter()
        self.waiting[id(waiter)] = waiter
        try:
            yield waiter
        finally:
            del self.waiting[id(waiter)]

    def wake(self) -> None:
        """Let all waiters look around."""
        for waiter in list(self.waiting.values()):
            waiter.wake()
