"""Those who wait for an engine beside its own thread, and what its loop says of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import Idle
from megatron_async.errors import EngineStoppedError, IntegrityError
from tests.support.engines import drive, engine_at, greedy
from tests.support.liveness import MOST_STEPS, waiting, woken
from tests.support.oracle import Ask, decode_alone
from tests.support.own_thread import (
    OwnThread,
    check_idle_for_a_reason,
    in_another_thread,
    watched_waiters,
)
from tests.support.patience import PATIENCE_SECONDS


def resume_both(engine: DynamicInferenceEngine) -> None:
    for number in (0, 1):
        engine.resume_request(number)


BY_OTHERS: dict[str, Callable[[DynamicInferenceEngine], Any]] = {
    "resumes": resume_both,
    "resumes and steps": lambda engine: (resume_both(engine), drive(engine)),
    "aborts": lambda engine: [engine.abort_request(number) for number in (0, 1)],
    "starts the thread": lambda engine: (resume_both(engine), engine.start()),
    "resets": lambda engine: engine.reset(),
}


@pytest.mark.parametrize("act", BY_OTHERS.values(), ids=BY_OTHERS)
@pytest.mark.parametrize("depth", (0, 2))
def test_generate_beside_paused_requests_waits_without_a_poll(
    depth: int, act: Callable[[DynamicInferenceEngine], Any]
) -> None:
    """Two callers wait at once, and neither takes the other's wake-up."""
    with watched_waiters(), engine_at(depth) as engine:
        original = engine.requests.add

        def add_paused(*args: Any, **options: Any) -> Any:
            added = original(*args, **options)
            for number in (0, 1):
                engine.pause_request(number)
            return added

        results: list[Any] = []

        def generate() -> None:
            results.append(engine.generate([[2]], greedy(3)))

        with patch.object(engine.requests, "add", add_paused):
            callers = [threading.Thread(target=generate, daemon=True) for _ in range(2)]
            for caller in callers:
                caller.start()
            woken(lambda: True, waiting(engine, 2), lambda: None)
        before = engine.loop.steps_run
        act(engine)
        for caller in callers:
            caller.join(PATIENCE_SECONDS)
        assert len(results) == 2, "nobody woke generate"
        assert engine.loop.steps_run - before < 60


def test_an_error_that_stops_no_step_ends_the_thread_and_all_who_wait() -> None:
    """A sink that breaks its word: it raises outside of the step lock."""

    class Raises:
        def deliver(self, taken: Any) -> None:
            raise OSError("the sink is full")

        def fail(self, error: EngineStoppedError) -> None:
            """At the end."""

    engine = engine_at(1)
    engine.deliver_to(Raises())
    with engine:
        engine.start()
        future = engine.add_request(0, [1], greedy(40))
        with pytest.raises(EngineStoppedError, match="the sink is full"):
            future.result(PATIENCE_SECONDS)
        with pytest.raises(EngineStoppedError, match="the sink is full"):
            engine.generate([[1]], greedy(2))


def test_generate_takes_over_the_steps_of_a_thread_that_is_stopped() -> None:
    with watched_waiters():
        engine = engine_at(1)
        with engine:
            thread = OwnThread(engine)
            result = woken(
                lambda: engine.generate([[1]], greedy(40)),
                lambda: waiting(engine)() and thread.run(1) is False and thread.steps > 3,
                thread.stop,
            )
            assert result[0].generated_tokens == decode_alone(Ask((1,), 40))[0]


def test_streams_get_tokens_that_a_caller_steps_for() -> None:
    """Also when the thread was stopped under them."""
    import asyncio

    async def consume(engine: DynamicInferenceEngine) -> list[int]:
        found = []
        async for output in engine.stream([1], greedy(30)):
            found.append(output.token_id)
            if len(found) == 3:
                await asyncio.to_thread(engine.stop)
                await asyncio.to_thread(drive, engine)
        return found

    with engine_at(1) as engine:
        engine.start()
        assert asyncio.run(consume(engine)) == decode_alone(Ask((1,), 30))[0]


def test_a_stream_that_opens_while_the_engine_stops_ends_with_the_reason() -> None:
    """The engine stops behind the check, and before the stream is there to be told."""
    import asyncio

    async def consume(engine: DynamicInferenceEngine) -> None:
        add = engine.streams.add

        def add_late(*args: Any) -> None:
            with pytest.raises(EngineStoppedError):
                in_another_thread(lambda: fail_now(engine))
            add(*args)

        with patch.object(engine.streams, "add", add_late):
            async for _ in engine.stream([1], greedy(3)):
                raise AssertionError("a token of an engine that has stopped")

    def fail_now(engine: DynamicInferenceEngine) -> None:
        engine.lock.stop(EngineStoppedError("stopped meanwhile"))
        engine.lock.check()

    with engine_at(1) as engine:
        engine.start()
        with pytest.raises(EngineStoppedError, match="stopped meanwhile"):
            asyncio.run(asyncio.wait_for(consume(engine), PATIENCE_SECONDS))


def test_an_engine_that_can_plan_nothing_stops_and_says_so() -> None:
    """A scheduler that forgets to make room is an error, not a silence."""
    with engine_at(1) as engine:
        future = engine.add_request(0, [1], greedy(5))
        with (
            patch.object(engine.scheduler, "plan", lambda: None),
            pytest.raises(IntegrityError, match="no step can be planned"),
        ):
            engine.loop._plan = engine.scheduler.plan
            for _ in range(10):
                engine.step_modern()
        with pytest.raises(EngineStoppedError, match="no step can be planned"):
            future.result(timeout=0)


def test_the_reasons_of_an_idle_engine() -> None:
    with engine_at(1) as engine:
        assert engine.loop.idle_reason is Idle.NO_REQUEST
        engine.add_request(0, [1], greedy(9))
        assert engine.loop.idle_reason is None
        engine.pause_request(0)
        engine.step_modern()
        assert engine.loop.idle_reason is Idle.PAUSED
        engine.suspend()
        assert engine.loop.idle_reason is Idle.SUSPENDED
        engine.resume()
        engine.add_request(1, [2], greedy(2))
        drive_until_idle(engine)
        assert engine.loop.idle_reason is Idle.PAUSED
        check_idle_for_a_reason(engine)
        engine.abort_request(0)
        assert engine.loop.idle_reason is None
        drive(engine)
        drive_until_idle(engine)
        assert engine.loop.idle_reason is Idle.NO_REQUEST


def drive_until_idle(engine: DynamicInferenceEngine) -> None:
    for _ in range(MOST_STEPS):
        if engine.loop.is_idle():
            return
        engine.step_modern()
    raise AssertionError("the engine does not come to rest")
