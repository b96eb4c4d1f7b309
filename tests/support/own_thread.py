"""The engine's own thread under control: it runs the steps that a test allows, and the test knows
when it has gone to sleep. Nothing here depends on time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import Idle
from megatron_async.engine.requests.output_processor import Taken, TokenOutput
from megatron_async.engine.stepping import waiters
from megatron_async.engine.stepping.driver import Driver
from megatron_async.errors import EngineStoppedError
from tests.support.patience import PATIENCE_SECONDS

FOREVER = 1 << 40


class AsleepBesideWorkError(AssertionError):
    """The thread waits for a wake-up that nobody will send."""


class WatchedWaiter(waiters.Waiter):
    """A waiter of which one knows whether its thread sleeps without a wake-up on its way.

    Attributes:
        before_wait: called by the thread between its look and the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = False
        self.thread = threading.current_thread()
        self.before_wait: Callable[[], None] = lambda: None
        self._sent = self._taken = 0
        self._lock = threading.RLock()

    def wait(self) -> None:
        self.before_wait()
        self.is_waiting = True
        super().wait()
        self.is_waiting = False
        self._taken += 1

    def wake(self, *_: object) -> None:
        with self._lock:
            if self._wakes.empty():
                self._sent += 1
                self._wakes.put(None)

    @property
    def sleeps(self) -> bool:
        """Nothing but a further wake-up ends the wait."""
        with self._lock:
            return self.is_waiting and self._sent == self._taken


class OwnThread:
    """The own thread of ``engine``: :meth:`run` lets it make steps, one after the other.

    A step is what the thread does between two looks at whether it is idle. Between two calls the
    thread stands before a step, outside of all locks, or sleeps.

    Attributes:
        steps: those that were made.
        after_step: called by the thread when a step has ended, before its next look.
        after_look: called by the thread with what it saw when it looked whether it is idle.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.steps = 0
        self.after_step: Callable[[], None] = lambda: None
        self.after_look: Callable[[bool], None] = lambda idle: None
        self.engine = engine
        self._allowed = 0
        self._is_before_step = False
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        driver: Driver = engine._driver
        step, loop = driver._step_for_waiters, engine.loop
        look = loop.is_idle

        def stepping() -> None:
            with self._changed:
                self._is_before_step = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.steps < self._allowed, PATIENCE_SECONDS)
                self._is_before_step = False
            try:
                step()
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self.steps += 1
                self.after_step()

        def looking() -> bool:
            idle = look()
            if threading.current_thread().name == "engine":
                self.after_look(idle)
            return idle

        driver._step_for_waiters = stepping  # type: ignore[method-assign]
        loop.is_idle = looking  # type: ignore[method-assign]
        engine.start()

    @property
    def waiter(self) -> WatchedWaiter | None:
        """The thread's, from its first look on."""
        for waiter in list(self.engine.loop.commands.waiters.waiting.values()):
            assert isinstance(waiter, WatchedWaiter)
            if waiter.thread.name == "engine":
                return waiter
        return None

    @property
    def sleeps(self) -> bool:
        """The thread has nothing to do, and no wake-up is on its way to it."""
        return self.waiter is not None and self.waiter.sleeps

    def run(self, steps: int) -> bool:
        """Allow so many steps more; back when they are made, or the thread sleeps or has failed.
        Returns whether it sleeps."""
        with self._changed:
            self._allowed = self.steps + steps
            self._changed.notify_all()
        self.settle()
        return self.sleeps

    def settle(self) -> None:
        """Until all allowed steps are made, or the thread sleeps or has failed."""
        end = PATIENCE_SECONDS / 1e-4
        with self._changed:
            # Nothing tells that a thread has gone to sleep: look, in short intervals.
            while not (self._failure or self.sleeps or self._has_made_all):
                self._changed.wait(1e-4)
                end -= 1
                assert end > 0, "the engine's thread neither steps nor sleeps"
            self._allowed = self.steps
        if self._failure is not None:
            raise self._failure
        if self.sleeps:
            check_asleep_for_a_reason(self.engine)

    @property
    def _has_made_all(self) -> bool:
        return self._is_before_step and self.steps >= self._allowed

    def run_dry(self, bound: int) -> None:
        """Steps until the thread sleeps, at most ``bound``. Nobody asks for anything meanwhile."""
        assert self.run(bound), f"the engine does not come to an end in {bound} steps"

    def stop(self) -> None:
        """Back to an engine that its callers step."""
        with self._changed:
            self._allowed = FOREVER
            self._changed.notify_all()
        self.engine.stop()


def check_asleep_for_a_reason(engine: DynamicInferenceEngine) -> None:
    """While the thread of ``engine`` sleeps: nothing is left for it to do."""
    if engine.loop.idle_reason is None:
        raise AsleepBesideWorkError("the thread sleeps, and the loop is not idle")
    check_idle_for_a_reason(engine)


def check_idle_for_a_reason(engine: DynamicInferenceEngine) -> None:
    """Between two steps: if the loop says that it is idle there is a reason of the list, it is
    true, and a plan finds nothing."""
    loop, scheduler = engine.loop, engine.scheduler
    reason = loop.idle_reason
    if reason is None:
        return
    live = [s for s in scheduler.table.sequences.values() if s.reason is None]
    is_true = {
        Idle.NO_REQUEST: not live,
        Idle.PAUSED: bool(live) and all(s.held for s in live),
        Idle.SUSPENDED: engine.suspended,
    }
    if loop.in_flight_count or loop.commands.waiting or not is_true[reason]:
        raise AsleepBesideWorkError(f"{reason}: {[(s.key, s.state.name) for s in live]}")
    if reason is not Idle.SUSPENDED and scheduler.plan() is not None:
        raise AsleepBesideWorkError(f"{reason}, and a plan finds rows")


@contextmanager
def watched_waiters() -> Iterator[None]:
    """Engines that start their thread meanwhile have waiters that can be watched."""
    with patch.object(waiters, "Waiter", WatchedWaiter):
        yield


class TokenSink:
    """What the steps of an engine's own thread bring."""

    def __init__(self) -> None:
        self._tokens: list[TokenOutput] = []

    def deliver(self, taken: Taken) -> None:
        self._tokens += taken.outputs

    def fail(self, error: EngineStoppedError) -> None:
        """At the close."""

    def take(self) -> dict[str, Any]:
        """The tokens since the last call, as a step has them."""
        tokens, self._tokens = self._tokens, []
        return {"tokens": tokens}


@contextmanager
def stepped_by_its_thread(engine: DynamicInferenceEngine) -> Iterator[OwnThread]:
    """A step of ``engine`` is one of its own thread meanwhile, or none while that sleeps."""
    with watched_waiters():
        sink = TokenSink()
        engine.deliver_to(sink)
        thread = OwnThread(engine)

        def step_modern() -> dict[str, Any]:
            thread.run(1)
            return sink.take()

        with patch.object(engine, "step_modern", step_modern):
            try:
                yield thread
            finally:
                thread.stop()


def in_another_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; it runs in another thread, and this one waits for it."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, name="asker", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert result, "a command waits for the engine's thread, which waits for the command"
    value, error = result[0]
    if error is not None:
        raise error
    return value
