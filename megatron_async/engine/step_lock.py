"""Who may step or change an engine, and whether it can be stepped at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from megatron_async.errors import EngineStoppedError, ReentrantCallError


class StepLock:
    """``with lock.mutex, lock:`` steps or changes an engine, one thread at a time.

    Two managers, since a signal may come between any two lines of Python: ``with mutex`` alone is
    sure to give it back. A second entry by the thread that is inside, which a signal's handler or a
    callback makes, is an error and changes nothing.

    An error on the way leaves scheduler and device at odds, so it stops the engine for good, unless
    whoever raised it has called :meth:`recover`: nothing has changed.

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
        self._busy = False
        self._on_stop = on_stop

    def check(self) -> None:
        """Raises :class:`EngineStoppedError` if the engine has stopped."""
        if self.stopped is not None:
            raise EngineStoppedError(*self.stopped.args) from self.stopped.__cause__

    def recover(self, error: BaseException) -> None:
        """``error`` is on its way out and has changed nothing."""
        self._recoverable = error

    def check_outside(self) -> None:
        """With the mutex: raises :class:`ReentrantCallError` if the caller is inside already."""
        if self._busy:
            raise ReentrantCallError(
                "the engine is in the midst of a step that this call interrupts; from a signal's "
                "handler or a callback, only add, change or abort requests"
            )

    def stop(self, error: EngineStoppedError) -> None:
        """Nobody steps the engine any more, unless it has stopped already."""
        if self.stopped is None:
            self.stopped = error
        self._tell_stopped(self.stopped)

    def __enter__(self) -> None:
        if self._busy:
            self.check_outside()
        if self.stopped is not None:
            self.check()
        self._busy = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._busy = False
        if error is None and self.stopped is None:
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

    def _tell_stopped(self, error: EngineStoppedError) -> None:
        for on_stop in self._on_stop:
            on_stop(error)
