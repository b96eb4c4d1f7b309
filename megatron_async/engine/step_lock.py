"""Decides which thread may step or change an engine, and whether it can be stepped at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from megatron_async.errors import EngineStoppedError, ReentrantCallError


class StepLock:
    """``with lock.mutex, lock.entry(), lock:`` steps or changes an engine, one thread at a time.

    Three managers, since a signal may come between any two lines of Python: the interpreter's own
    locks alone are sure to come back. A second entry by the thread that is inside, which a signal's
    handler or a callback makes, is an error and changes nothing.

    An error on the way leaves scheduler and device at odds, so it stops the engine for good, unless
    the code that raised it has called :meth:`recover`: nothing has changed.

    Args:
        on_stop: called with an error that stops the engine, still inside.

    Attributes:
        gate: held by other threads than the engine's own while they want the mutex, and passed by
            the engine's thread between two steps, so that they get their turn.
    """

    def __init__(self, on_stop: tuple[Callable[[EngineStoppedError], None], ...]) -> None:
        self.mutex = threading.RLock()
        self.gate = threading.RLock()
        self.stopped: EngineStoppedError | None = None
        self._recoverable: BaseException | None = None
        self._entry = threading.Lock()
        self._settled = True
        """The thread that was inside last has come to the end of :meth:`__exit__`."""
        self._on_stop = on_stop

    def check(self) -> None:
        """Raises :class:`EngineStoppedError` if the engine has stopped."""
        if self.stopped is not None:
            raise EngineStoppedError(*self.stopped.args) from self.stopped.__cause__

    def recover(self, error: BaseException) -> None:
        """``error`` is on its way out and has changed nothing."""
        self._recoverable = error

    @property
    def is_inside(self) -> bool:
        """Somebody steps or changes the engine. May be asked by any thread, and is old at once."""
        return self._entry.locked()

    def check_outside(self) -> None:
        """Raises :class:`ReentrantCallError` if the caller is inside already; it has the mutex."""
        if self._entry.locked():
            raise ReentrantCallError(
                "the engine is in the midst of a step that this call interrupts; from a signal's "
                "handler or a callback, only add, change or abort requests"
            )

    def entry(self) -> AbstractContextManager[object]:
        """What is held inside, for a caller that has the mutex. Raises as :meth:`check_outside`."""
        if self._entry.locked():
            self.check_outside()
        return self._entry

    def stop(self, error: EngineStoppedError) -> None:
        """Nobody steps the engine any more, unless it has stopped already."""
        if self.stopped is None:
            self.stopped = error
        self._tell_stopped(self.stopped)

    def __enter__(self) -> None:
        if not self._settled and self.stopped is None:
            reason = "a signal's handler interrupted the engine as a step ended"
            self.stop(EngineStoppedError(f"{reason}; build a new one"))
        if self.stopped is not None:
            self.check()
        self._settled = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None and self.stopped is None:
            self._settled = True
            return
        recoverable, self._recoverable = self._recoverable, None
        if self.stopped is None and error is not recoverable:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            self.stopped = EngineStoppedError(
                f"the engine was stopped by an error, {reason}; build a new one"
            )
            self.stopped.__cause__ = error
        if self.stopped is not None:
            self._tell_stopped(self.stopped)
        self._settled = True

    def _tell_stopped(self, error: EngineStoppedError) -> None:
        for on_stop in self._on_stop:
            on_stop(error)
