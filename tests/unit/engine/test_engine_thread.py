"""The engine's own thread: it sleeps when there is nothing to do, and nobody else steps then."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest

from megatron_async.errors import (
    EngineStoppedError,
    EngineThreadError,
    ReentrantCallError,
    RequestError,
)
from tests.support.engines import DEPTHS, drive, engine_at, greedy, hash_engine
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone


def expected(prompt: int, count: int) -> list[int]:
    return decode_alone(Ask((prompt,), count))[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_futures_are_done_without_a_step_by_anybody(depth: int) -> None:
    with engine_at(depth) as engine:
        engine.start()
        futures = [engine.add_request(i, [i + 1], greedy(9 + i)) for i in range(8)]
        for i, future in enumerate(futures):
            assert future.result(timeout=60).generated_tokens == expected(i + 1, 9 + i)
        engine.stop()
        later = engine.add_request(9, [5], greedy(3))
        assert not later.done()
        drive(engine)  # steps are the callers' again
        assert later.result(timeout=0).generated_tokens == expected(5, 3)


def test_nobody_else_may_step_while_the_thread_does() -> None:
    with engine_at(1) as engine:
        engine.start()
        engine.start()  # it has one already
        with pytest.raises(EngineThreadError, match=r"stop\(\) it"):
            engine.step_modern()
        assert engine.generate([[1], [2]], greedy(5))[1].generated_tokens == expected(2, 5)
        engine.stop()
        engine.stop()
        assert engine.step_modern()["tokens"] == []


@pytest.mark.parametrize("stop", ("stop", "close"))
def test_the_thread_ends_with_stop_and_close(stop: str) -> None:
    before = threading.active_count()
    engine = engine_at(1)
    engine.start()
    engine.generate([[1]], greedy(2))
    getattr(engine, stop)()
    engine.close()
    assert threading.active_count() <= before


def idle(engine: Any) -> None:
    """Until the thread has taken all there was and sleeps."""
    end = time.monotonic() + 60
    while not engine.loop.is_idle() and time.monotonic() < end:
        time.sleep(1e-3)
    assert engine.loop.is_idle()


def test_an_idle_engine_runs_no_step() -> None:
    """It blocks on the queue: neither time nor paused requests make it look."""
    with engine_at(1) as engine:
        engine.start()
        engine.generate([[1]], greedy(3))
        future = engine.add_request(0, [1], greedy(300 - 60))
        engine.pause_request(0)
        idle(engine)
        before = engine.loop.steps_run
        time.sleep(0.2)
        assert engine.loop.steps_run == before
        engine.resume_request(0)
        assert future.result(timeout=60).generated_tokens == expected(1, 240)


def test_suspended_engine_sleeps_and_goes_on() -> None:
    with engine_at(2) as engine:
        engine.start()
        future = engine.add_request(0, [1], greedy(200))
        engine.suspend()
        before = engine.counters.steps_launched
        time.sleep(0.1)
        assert engine.suspended and engine.counters.steps_launched == before
        assert engine.in_flight_count == 0
        engine.resume()
        assert future.result(timeout=60).generated_tokens == expected(1, 200)


def test_weights_and_resets_come_between_two_steps_of_the_thread() -> None:
    with engine_at(2) as engine:
        engine.start()
        future = engine.add_request(0, [1], greedy(230))
        for salt in range(4):
            assert engine.update_weights({"salt": salt % 2}) == salt + 1
        request = future.result(timeout=60)
        assert {span.version for span in request.weight_spans} <= set(range(5))
        dropped = engine.add_request(1, [1], greedy(230))
        engine.reset()
        assert dropped.result(timeout=60).finish_reason == "abort"
        assert engine.generate([[1]], greedy(4))[0].weight_spans == [(0, 4)]


def test_an_error_in_a_step_reaches_those_who_wait_for_the_thread() -> None:
    class Fails(HashModel):
        def forward(self, *arguments: Any) -> Any:
            raise ValueError("boom")

    async def consume(engine: Any) -> None:
        async for _ in engine.stream([1], greedy(5)):
            raise AssertionError("a token of a model that fails")

    with engine_at(1, model=Fails()) as engine:
        engine.start()
        future = engine.add_request(0, [1], greedy(5))
        with pytest.raises(EngineStoppedError, match="boom"):
            future.result(timeout=60)
        with pytest.raises(EngineStoppedError, match="boom"):
            engine.start()
    with engine_at(1, model=Fails()) as engine, pytest.raises(EngineStoppedError, match="boom"):
        asyncio.run(consume(engine))


def test_callback_in_the_thread_may_add_requests_and_not_wait_for_steps() -> None:
    raised, added = [], []
    with engine_at(1) as engine:

        def callback(_: Any) -> None:
            added.append(engine.add_request(5, [2], greedy(4)))
            for call in (engine.step_modern, lambda: engine.generate([[1]], greedy(2))):
                with pytest.raises((EngineThreadError, ReentrantCallError)) as error:
                    call()
                raised.append(error)

        engine.start()
        engine.add_request(0, [1], greedy(3)).add_done_callback(callback)
        end = time.monotonic() + 60
        while len(raised) < 2 and time.monotonic() < end:
            time.sleep(1e-3)
        assert added[0].result(timeout=60).generated_tokens == expected(2, 4)
    assert len(raised) == 2


# --- streams ----------------------------------------------------------------------------------


async def collect(engine: Any, prompt: int, count: int) -> list[int]:
    return [output.token_id async for output in engine.stream([prompt], greedy(count))]


@pytest.mark.parametrize("started", (False, True))
@pytest.mark.parametrize("depth", DEPTHS)
def test_streams_get_their_tokens_and_the_event_loop_runs_no_step(
    depth: int, started: bool
) -> None:
    steppers: set[str] = set()

    class Observer:
        def on_launch(self, plan: object) -> None:
            steppers.add(threading.current_thread().name)

    async def main(engine: Any) -> list[list[int]]:
        return await asyncio.gather(*(collect(engine, i + 1, 5 + i) for i in range(12)))

    with engine_at(depth) as engine:
        engine.observe(Observer())
        if started:
            engine.start()
        streams = asyncio.run(main(engine))
        assert steppers == {"engine"}
        assert len(engine.streams) == 0
        if not started:
            engine.step_modern()  # the thread of the streams has ended with them
    assert streams == [expected(i + 1, 5 + i) for i in range(12)]


def test_leaving_a_stream_early_aborts_its_request_alone() -> None:
    async def main(engine: Any) -> list[int]:
        other = asyncio.create_task(collect(engine, 2, 40))
        stream = engine.stream([1], greedy(200), request_id=7)
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                break
        await stream.aclose()
        return await other

    with engine_at(1) as engine:
        engine.start()
        assert asyncio.run(main(engine)) == expected(2, 40)
        idle(engine)
        assert engine.counters.tokens_committed < 240
        with pytest.raises(RequestError, match="not known"):
            engine.get_request(7)


def test_streams_of_several_event_loops() -> None:
    with engine_at(2) as engine:
        results: dict[int, list[int]] = {}

        def run(number: int) -> None:
            results[number] = asyncio.run(collect(engine, number, 20 + number))

        threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: expected(n, 20 + n) for n in range(1, 6)}


def test_stream_of_a_closed_engine_ends_with_the_reason() -> None:
    async def main(engine: Any) -> None:
        stream = engine.stream([1], greedy(200))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        async for _ in stream:
            pass

    for _ in range(20):  # a fast engine may be done before it is closed
        try:
            asyncio.run(main(engine_at(1)))
        except EngineStoppedError as error:
            assert "closed" in str(error)
            return
    pytest.fail("no stream was cut short")


def test_a_refused_stream_leaves_nothing_behind() -> None:
    async def main(engine: Any) -> None:
        with pytest.raises(RequestError, match="prompt"):
            await anext(engine.stream([]))

    with engine_at(1) as engine:
        asyncio.run(main(engine))
        assert len(engine.streams) == 0
        assert engine.step_modern()["tokens"] == []


def test_one_wake_up_for_all_streams_of_a_step() -> None:
    """32 streams do not cost the event loop 32 callbacks a step."""
    calls = 0

    async def main(engine: Any) -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def counting(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return call_soon(*args, **options)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        await asyncio.gather(*(collect(engine, i + 1, 20) for i in range(32)))

    with hash_engine(1, max_requests=32, block_count=128, block_size_tokens=16) as engine:
        asyncio.run(main(engine))
        assert 0 < calls <= engine.counters.steps_committed


# --- memory -----------------------------------------------------------------------------------


def test_a_closed_and_dropped_engine_kept_its_cache_until_a_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        engine = engine_at(1)
        engine.generate([[1]], greedy(2))
        cache = weakref.ref(engine.cache.kv)
        engine.close()
        assert cache() is None, "close() gives the cache back while the engine is still there"
        parts = [weakref.ref(part) for part in (engine, engine.batch, engine.runner)]
        del engine
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_memory_of_many_engines_over_the_same_weights_comes_back_without_a_collection() -> None:
    caches = []
    with engine_at(1) as first:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                with first.with_config(first.config) as engine:
                    engine.generate([[1]], greedy(2))
                    caches.append(weakref.ref(engine.cache.kv))
                assert all(cache() is None for cache in caches)
        finally:
            gc.enable()
