"""Whose turn it is to step an engine, and whether it can be stepped at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from megatron_async.errors import EngineStoppedError


class Turn:
    """``with told, turn.lock, turn:`` changes an engine, one thread at a time.

    Three managers, since a signal may come between any two lines of Python: ``with lock`` alone is
    sure to give a lock back.

    An error on the way leaves scheduler and device at odds, so it stops the engine for good, unless
    whoever raised it put it into :attr:`harmless`: nothing has changed.

    Args:
        stop: what else an error does, still within the turn.
    """

    def __init__(self, stop: Callable[[EngineStoppedError], None]) -> None:
        self.lock = threading.RLock()
        self.stopped: EngineStoppedError | None = None
        self.harmless: BaseException | None = None
        self._thread: int | None = None
        self._stop = stop

    def check(self) -> None:
        """Raises :class:`EngineStoppedError` if the engine has stopped."""
        if self.stopped is not None:
            raise EngineStoppedError(*self.stopped.args) from self.stopped.__cause__

    @property
    def is_mine(self) -> bool:
        """The calling thread is in the midst of it: a signal's handler."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        self.check()
        self._thread = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread = None
        harmless, self.harmless = self.harmless, None
        if self.stopped is None and error is not None and error is not harmless:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            self.stopped = EngineStoppedError(
                f"the engine was stopped by an error, {reason}; build a new one"
            )
            self.stopped.__cause__ = error
        if self.stopped is not None:
            self._stop(self.stopped)


class Told:
    """``with told:`` around a turn: after it, and outside, ``tell`` is called. Callbacks of users
    may take a turn again."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._tell()
