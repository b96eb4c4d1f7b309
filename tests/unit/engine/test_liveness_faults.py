"""Faults in waking and waiting are found by the tests of liveness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from megatron_async.engine.commands import CommandQueue
from megatron_async.engine.metrics import Idle
from megatron_async.engine.stepping.driver import Driver
from megatron_async.engine.stepping.engine_thread import EngineThread
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.engine.stepping.waiters import Waiter, Waiters
from megatron_async.errors import EngineStoppedError, IntegrityError
from megatron_async.scheduler.preemption import Preemption
from tests.support.engines import engine_at, greedy
from tests.support.liveness import MOST_STEPS, own_thread, place, waiting, woken
from tests.support.own_thread import AsleepBesideWorkError, WatchedWaiter, watched_waiters
from tests.unit.engine import test_liveness


def stale_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before: the last plan is believed, whatever came behind it."""
    step = DecodeLoop.step

    def stepping(self: Any) -> None:
        plan, self.found = self._plan, []
        self._plan = lambda: self.found.append(plan()) or self.found[-1]
        try:
            step(self)
        finally:
            self._plan = plan

    def idle_reason(self: Any) -> Idle | None:
        if self._in_flight or self.commands.waiting:
            return None
        found = getattr(self, "found", [])
        return Idle.PAUSED if (found and found[-1] is None) or self.suspended else None

    monkeypatch.setattr(DecodeLoop, "step", stepping)
    monkeypatch.setattr(DecodeLoop, "idle_reason", property(idle_reason))


def silent_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CommandQueue, "submit", lambda self, *commands: self.waiting.extend(commands)
    )


def silent_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_changed", lambda self: self._outputs.resolve_futures())


def wakes_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: CommandQueue, *commands: Any) -> None:
        self.waiters.wake()
        self.waiting.extend(commands)

    monkeypatch.setattr(CommandQueue, "submit", submit)


def one_token_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def wake(self: Waiters) -> None:
        for waiter in list(self.waiting.values())[:1]:
            waiter.wake()

    monkeypatch.setattr(Waiters, "wake", wake)


def forgets_a_wake_up_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = WatchedWaiter.wait

    def forgetful(self: Any) -> None:
        self.before_wait()
        self.before_wait = lambda: None
        while not self._wakes.empty():
            self._wakes.get()
            self._taken += 1
        wait(self)

    monkeypatch.setattr(WatchedWaiter, "wait", forgetful)


def paused_requests_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of paused requests is one too high, so all seem to be paused."""
    from megatron_async.scheduler.request_table import RequestTable

    hold = RequestTable.hold

    def holding(self: Any, sequence: Any) -> None:
        hold(self, sequence)
        self.held += 1

    monkeypatch.setattr(RequestTable, "hold", holding)


def nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is evicted: those who are short wait for each other."""
    monkeypatch.setattr(Preemption, "relieve", lambda self, need, beneficiary: None)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], Any]] = {
    stale_idleness: lambda: (
        test_liveness.test_a_request_that_waits_for_blocks_is_served_when_they_come_free(
            1, "length", 0
        )
    ),
    silent_commands: lambda: place(1, "add", "in wait", 0),
    wakes_before_the_command: lambda: wakes_too_early(),
    silent_changes: lambda: place(1, "resume", "in wait", 0, paused=False),
    one_token_for_all_who_wait: lambda: two_who_wait(),
    forgets_a_wake_up_before_the_wait: lambda: place(1, "add", "before wait", 0),
    paused_requests_are_counted_twice: lambda: place(1, "add", "in wait", 0),
    nothing_gives_way: lambda: (
        test_liveness.test_requests_that_outgrow_the_cache_in_the_same_step_all_end(1, 2, 0)
    ),
}


def wakes_too_early() -> None:
    """The thread looks between the wake-up and the command."""
    with own_thread(engine_at(1)) as thread:
        thread.run(1)
        wake = Waiters.wake

        def wake_and_let_it_look(self: Waiters) -> None:
            wake(self)
            thread.settle()

        with patch.object(Waiters, "wake", wake_and_let_it_look):
            thread.engine.add_request(0, [1], greedy(3))
        thread.run_dry(MOST_STEPS)


def two_who_wait() -> None:
    """The engine's thread and one more; the one that came last is to go on."""
    with watched_waiters(), engine_at(1) as engine, engine.loop.commands.waiters.waiter() as first:
        assert isinstance(first, Waiter)
        thread = EngineThread(lambda: None, engine.loop.is_idle, engine.loop.commands.waiters)
        thread.start()
        woken(lambda: True, waiting(engine), lambda: None)
        engine.add_request(0, [1], greedy(3))
        waiters = list(engine.loop.commands.waiters.waiting.values())
        asleep = [w for w in waiters if isinstance(w, WatchedWaiter) and w.sleeps]
        thread._stopping = True
        for waiter in waiters:
            waiter.wake()
        if asleep:
            raise AsleepBesideWorkError(f"{len(asleep)} of {len(waiters)} sleep")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault]()
    fault(monkeypatch)
    with pytest.raises((AsleepBesideWorkError, IntegrityError, EngineStoppedError)):
        FAULTS[fault]()
