"""Carries what the steps of an engine's own thread bring to the one consumer that takes it all."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from megatron_async.engine.requests.output_processor import Taken
from megatron_async.errors import EngineStoppedError


class OutputSink(Protocol):
    """Takes what steps bring. Its methods do not raise, nor step the engine."""

    def deliver(self, taken: Taken) -> None:
        """What was committed since the last call. After a step and outside of the step lock, in
        one thread at a time: the engine's own, or one that suspends the engine."""

    def fail(self, error: EngineStoppedError) -> None:
        """Nothing will come any more. Inside the step lock."""


class SinkQueue:
    """Keeps the order of steps between the step lock, under which outputs are taken, and the sink,
    which gets them outside of it.

    Attributes:
        waiting: what :meth:`flush` is to hand out, for a look without a call.
    """

    def __init__(self) -> None:
        self.sink: OutputSink | None = None
        self.waiting: deque[Taken] = deque()
        self._lock = threading.RLock()  # a signal's handler may suspend the engine meanwhile

    def put(self, taken: Taken) -> None:
        """Inside the step lock: a step has brought this."""
        if self.sink is not None and (taken.outputs or taken.finished):
            self.waiting.append(taken)

    def flush(self) -> None:
        """Outside of the step lock: hand out all that was put."""
        if not self.waiting or self.sink is None:
            return
        with self._lock:
            while self.waiting:
                self.sink.deliver(self.waiting.popleft())

    def fail(self, error: EngineStoppedError) -> None:
        """Tell the sink that no request will bring anything any more."""
        if self.sink is not None:
            self.sink.fail(error)
