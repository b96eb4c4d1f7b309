"""Controls of the whole engine, each in a thread of its own: none waits behind another one."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineStoppedError,
    IntegrityError,
    MegatronAsyncError,
    RankDiedError,
    RequestError,
)
from megatron_async.serving.engine_side.live_requests import ConnectedFrontEnd
from megatron_async.serving.messages import Answer, Control

logger = logging.getLogger(__name__)

MOST = 64
"""Controls that may wait for requests, steps or trainers at the same time."""
AT_ONCE = frozenset({"resume", "wake_up", "abort_requests", "suspend", "state"})
"""Are counted by themselves: they end what the others may wait for, however many do."""
CLOSE_SECONDS = 1.0
"""For controls to give their answers when the process ends."""

Say = Callable[[Answer], object]


class Call:
    """A control in progress.

    Attributes:
        order: of its arrival among all controls.
        wake: set when it is cancelled, so that what waits ends; a control may set it too.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.is_cancelled = False
        self.wake = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.is_cancelled = True
        self.wake.set()


class ControlThreads:
    """Carries out :class:`~megatron_async.serving.messages.Control`.

    Args:
        methods: what to call, by the names of controls.
    """

    def __init__(self, methods: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        self._methods = methods
        self._calls: dict[tuple[ConnectedFrontEnd, int], Call] = {}
        self._places = {True: threading.Semaphore(MOST), False: threading.Semaphore(MOST)}
        """By whether a control is one of :data:`AT_ONCE`."""
        self._orders = itertools.count(1)
        self._own = threading.local()
        self._ended = threading.Condition()

    @property
    def current(self) -> Call:
        """The call of the thread that asks."""
        call: Call = self._own.call
        return call

    def submit(self, front_end: ConnectedFrontEnd, control: Control, say: Say) -> None:
        """Begin a control; ``say`` gets its answer."""
        places = self._places[control.name in AT_ONCE]
        if not places.acquire(blocking=False):
            said = f"{MOST} controls wait already; try again when they are done"
            say(Answer(control.number, error=said, kind="busy"))
            return
        key = front_end, control.number
        call = self._calls[key] = Call(next(self._orders))

        def run() -> None:
            self._own.call = call
            try:
                say(self._answer(control))
            finally:
                places.release()
                with self._ended:
                    self._calls.pop(key, None)
                    self._ended.notify_all()

        self.begin(run, control.name)

    def begin(self, work: Callable[[], object], name: str) -> None:
        """Do something in a thread that nobody waits for at the end of the process."""
        threading.Thread(target=work, name=f"control {name}", daemon=True).start()

    def cancel(self, front_end: ConnectedFrontEnd, number: int | None = None) -> None:
        """Nobody waits for a front end's control any more, or for any of them."""
        for (of, each), call in list(self._calls.items()):
            if of is front_end and number in (None, each):
                call.cancel()

    def close(self, wake: Callable[[], None]) -> None:
        """End; controls in progress get a moment to answer; ``wake`` has them look whether they are
        cancelled."""
        for call in list(self._calls.values()):
            call.cancel()
        wake()
        deadline = time.monotonic() + CLOSE_SECONDS
        with self._ended:
            self._ended.wait_for(lambda: not self._calls, deadline - time.monotonic())

    def _answer(self, control: Control) -> Answer:
        try:
            method = self._methods.get(control.name)
            if method is None:
                raise RequestError(f"{control.name!r} is none of {', '.join(self._methods)}")
            return Answer(control.number, method(**control.arguments))
        except Exception as error:
            return answer_of(control, error)


def answer_of(control: Control, error: Exception) -> Answer:
    """What a control is answered that has met an error."""
    kind = kind_of(error)
    if kind == "internal":
        logger.error("%s failed", control.name, exc_info=error)
    known = isinstance(error, MegatronAsyncError)
    said = str(error) if known else f"{type(error).__name__}: {error}"
    return Answer(control.number, error=said, kind=kind)


def kind_of(error: Exception) -> str:
    """Return the kind of an :class:`~megatron_async.serving.messages.Answer`."""
    if isinstance(error, BusyError):
        return "busy"
    if isinstance(error, EngineStoppedError | EngineDeadError | RankDiedError):
        return "dead"
    is_known = isinstance(error, MegatronAsyncError) and not isinstance(error, IntegrityError)
    return "invalid" if is_known else "internal"
