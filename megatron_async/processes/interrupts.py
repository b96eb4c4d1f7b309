"""Ctrl-C waits until what must be done as a whole is done, as the copies of new weights."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


def with_interrupt_behind(call: Callable[[], None]) -> None:
    """Call, with the first SIGINT handled when ``call`` has returned or raised: half of a model's
    weights would be new. A second one is handled at once.

    On other threads than the main one, which gets no signal, and where no handler of Python's would
    be called, this is ``call()``.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        call()
        return
    waiting = _Waiting(handler)
    try:
        signal.signal(signal.SIGINT, waiting)
        call()
    finally:
        if signal.getsignal(signal.SIGINT) is waiting:
            signal.signal(signal.SIGINT, handler)
        if waiting.is_due:
            handler(signal.SIGINT, None)


class _Waiting:
    """A handler that notes the first signal, and hands others to the one before it."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self.is_due = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_due:
            self.is_due = False
            self._handler(number, frame)
            return
        self.is_due = True
        logger.warning(
            "an interrupt waits until the weights have been replaced; another one does not, and "
            "stops the engines with some of them new"
        )
