"""Whose turn it is to step an engine, and whether it can be stepped at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from megatron_async.errors import CheckpointError, ConfigError, EngineStoppedError, RequestError

REFUSED = (CheckpointError, ConfigError, EngineStoppedError, RequestError)
"""What is raised before anything has changed."""


class Turn:
    """``with turn:`` changes an engine, one thread at a time.

    An error on the way leaves scheduler and device at odds, so it stops the engine for good, unless
    nothing has changed yet: :data:`REFUSED`, and what interrupted a wait (:attr:`interrupt`).

    Args:
        stop: what else an error does, still within the turn.
        tell: what follows a turn, outside of it: callbacks of users, who may take a turn again.
    """

    def __init__(
        self, stop: Callable[[EngineStoppedError], None], tell: Callable[[], None]
    ) -> None:
        self.lock = threading.RLock()
        self.stopped: EngineStoppedError | None = None
        self.interrupt: BaseException | None = None
        self._stop = stop
        self._tell = tell

    def check(self) -> None:
        """Raises :class:`EngineStoppedError` if the engine has stopped."""
        if self.stopped is not None:
            raise EngineStoppedError(*self.stopped.args) from self.stopped.__cause__

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.stopped is not None:
            self.lock.release()
            self.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            harmless = error is None or error is self.interrupt or isinstance(error, REFUSED)
            self.interrupt = None
            if error is not None and not harmless and self.stopped is None:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self.stopped = EngineStoppedError(
                    f"the engine was stopped by an error, {reason}; build a new one"
                )
                self.stopped.__cause__ = error
                self._stop(self.stopped)
        finally:
            self.lock.release()
        self._tell()
