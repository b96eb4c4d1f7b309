"""The states of an engine that a coordinator's clients control, and waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from megatron_async.errors import RequestError
from megatron_async.megatron_api.coordinator.headers import Headers


class EngineState(Enum):
    """Where an engine stands. One engine has no other to wait for, so those in -ING are passed
    without a stop."""

    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    UNPAUSING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()
    RESUMED = auto()
    STOPPING = auto()
    STOPPED = auto()


class Transition(NamedTuple):
    """What a signal does: the states that it is for, the one that it leads to, and those in which
    it has nothing to do."""

    allowed: frozenset[EngineState]
    then: EngineState
    done: frozenset[EngineState] = frozenset()


_S = EngineState
TRANSITIONS = {
    Headers.PAUSE: Transition(
        frozenset({_S.RUNNING}), _S.PAUSED, frozenset({_S.PAUSED, _S.SUSPENDED})
    ),
    Headers.UNPAUSE: Transition(frozenset({_S.PAUSED}), _S.RUNNING, frozenset({_S.RUNNING})),
    Headers.SUSPEND: Transition(frozenset({_S.PAUSED}), _S.SUSPENDED, frozenset({_S.SUSPENDED})),
    Headers.RESUME: Transition(
        frozenset({_S.SUSPENDED}), _S.PAUSED, frozenset({_S.PAUSED, _S.RUNNING})
    ),
    Headers.STOP: Transition(
        frozenset({_S.PAUSED, _S.SUSPENDED}), _S.STOPPED, frozenset({_S.STOPPED})
    ),
}
"""megatron-core's. Clients of 0.16 stop a running engine too."""

# What a signal ends and what it begins, as waits see it.
_FLAGS = {
    Headers.PAUSE: ({_S.RUNNING}, {_S.PAUSED}),
    Headers.UNPAUSE: ({_S.PAUSED}, {_S.RUNNING}),
    Headers.SUSPEND: ({_S.RESUMED}, {_S.SUSPENDED}),
    Headers.RESUME: ({_S.SUSPENDED}, {_S.RESUMED}),
    Headers.STOP: ({_S.RUNNING, _S.SUSPENDED}, {_S.STOPPED}),
}
STABLE = frozenset({_S.RUNNING, _S.PAUSED, _S.SUSPENDED, _S.RESUMED, _S.STOPPED})
"""What can be waited for."""
FLAGS = (_S.RUNNING, _S.PAUSED, _S.STOPPED)
"""States that an engine has an attribute for, as in 0.16."""


class StateEvent:
    """As much of ``asyncio.Event`` as a wait needs; it is set in any thread, and waited for in any
    event loop."""

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def is_set(self) -> bool:
        """Whether the state was reached, and nothing has ended it since."""
        return self._is_set

    def set(self) -> None:
        """Let all go on that wait."""
        with self._lock:
            self._is_set = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """The state will not be reached any more: all waits raise ``error``."""
        with self._lock:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_resolve, future)

    def clear(self) -> None:
        """A wait from now on is for the next time."""
        self._is_set = False

    async def wait(self) -> None:
        """Return at once, or when the state is reached; raises why it will not be."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_set:
                return
            if self._error is not None:
                raise self._error
            future = loop.create_future()
            self._waiting.append((loop, future))
        await future
        if self._error is not None and not self._is_set:
            raise self._error


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class EngineStates:
    """The state of one engine.

    Attributes:
        state: the one that signals are judged by; never RESUMED, which is PAUSED.
        events: of each state that can be waited for.
        is_coordinated: clients send signals, so that there is something to wait for.
        on_reached: called with each signal that has done what it does.
    """

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self.is_coordinated = False
        self.on_reached: Callable[[Headers], None] | None = None
        self.events = {each: StateEvent(is_set=each is EngineState.RUNNING) for each in STABLE}

    def begin(self) -> None:
        """An engine that may have been stopped runs, and clients come."""
        for state in (EngineState.PAUSED, EngineState.STOPPED):
            self.events[state].clear()
        self.events[EngineState.RUNNING].set()
        self.state, self.is_coordinated = EngineState.RUNNING, True

    def reached(self, signal: Headers) -> None:
        """A signal has done what it does."""
        ended, begun = _FLAGS[signal]
        self.state = TRANSITIONS[signal].then
        for state in ended:
            self.events[state].clear()
        for state in begun:
            self.events[state].set()
        if self.on_reached is not None:
            self.on_reached(signal)

    def end(self, error: Exception) -> None:
        """The engine has stopped for good: nothing else is reached any more."""
        if not self.is_coordinated:
            return
        self.state = EngineState.STOPPED
        for state, event in self.events.items():
            if state is EngineState.STOPPED:
                event.set()
                continue
            event.clear()
            event.fail(error)

    async def wait_until(self, state: EngineState) -> None:
        """Wait until the engine has reached ``state``.

        Raises:
            RequestError: it is passed without a stop, or nobody sends signals.
            EngineStoppedError: the engine has stopped for good.
        """
        # megatron-core's own state says the same by its name.
        event = self.events.get(EngineState.__members__.get(getattr(state, "name", ""), state))
        if event is None:
            names = ", ".join(sorted(each.name for each in STABLE))
            raise RequestError(f"{state} cannot be waited for; wait for one of {names}")
        if not event.is_set() and not self.is_coordinated:
            raise RequestError(
                "nobody sends signals to this engine: call "
                "start_listening_to_data_parallel_coordinator() before wait_until()"
            )
        await event.wait()
