"""An engine that takes no step beside requests: who notices, and what ``/health`` says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import EngineStalledError
from megatron_async.serving.engine_side import engine_process
from megatron_async.serving.engine_side.stall_watch import (
    STALL_SECONDS,
    STEP_FACTOR,
    Seen,
    StallWatch,
)
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.metrics import EngineCollector, ServerMetrics
from megatron_async.serving.messages import Snapshot
from tests.support.engines import hash_engine
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import (
    NoParent,
    client_of,
    control,
    engine_in_thread,
    outputs_of,
    patience,
    run,
)
from tests.support.served_over_http import serving

PARAMS = {"num_tokens_to_generate": 5, "termination_id": -1, "temperature": 0.0}


class Clock:
    """Seconds that go on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """A watch, and what it sees of an engine that a test moves."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.clock = Clock()
        self.watch = StallWatch(seconds, self.clock)
        self.seen = Seen(0, 0, False, None)

    def after(self, seconds: float, *, waiting: int = 1, **changes: Any) -> str | None:
        """What the watch says after so many more seconds."""
        self.clock.now += seconds
        self.seen = self.seen._replace(**changes)
        self.watch.look(waiting, self.seen)
        return self.watch.stalled


def test_requests_stall_when_no_step_comes_for_longer_than_the_bound() -> None:
    looks = Looks()
    assert looks.after(0) is None
    assert looks.after(60) is None
    said = looks.after(0.5, waiting=3)
    assert said is not None and "3 requests" in said and "60 seconds" in said
    assert looks.after(100) is not None and looks.watch.count == 1
    assert looks.after(0.5, steps=1) is None
    assert looks.after(60) is None
    assert looks.after(1) is not None and looks.watch.count == 2
    assert looks.after(1, waiting=0) is None


def test_time_without_a_request_is_no_stall() -> None:
    looks = Looks()
    for _ in range(10):
        assert looks.after(1000, waiting=0) is None
    assert looks.after(60) is None
    assert looks.after(1) is not None


@pytest.mark.parametrize("change", ({"steps": 1}, {"steps": 2, "begun": 3, "is_inside": True}))
def test_each_step_begins_the_time_anew(change: dict[str, Any]) -> None:
    looks = Looks()
    looks.after(0)
    assert looks.after(59) is None
    looks.after(0.5, **change)
    assert looks.after(60) is None


def test_what_is_waited_for_by_name_is_no_stall_and_its_end_begins_the_time() -> None:
    looks = Looks()
    for _ in range(5):
        assert looks.after(1000, awaited="the engine is paused") is None
    assert looks.after(60, awaited=None) is None
    assert looks.after(0.5) is not None


def test_a_long_step_is_a_step_but_not_for_ever() -> None:
    looks = Looks()
    looks.after(0)
    looks.after(1, begun=1, is_inside=True)
    for _ in range(598):
        assert looks.after(1) is None
    said = looks.after(2)
    assert said is not None and "step of the engine has not ended" in said
    assert looks.after(1, is_inside=False) is None, "it has ended"
    assert looks.after(60) is None
    assert looks.after(1) is not None and looks.watch.count == 2


def test_steps_that_launch_nothing_are_none() -> None:
    """Each look finds the loop inside of another one."""
    looks = Looks()
    looks.after(0)
    said = [looks.after(1, begun=number, is_inside=bool(number % 3)) for number in range(70)]
    assert said[:60] == [None] * 60 and None not in said[60:]


# --- an engine whose thread sleeps beside work ------------------------------------------------


class Fault:
    """Makes the loop of an engine say that it is idle, whatever waits."""

    def __init__(self, engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there = False
        self._engine = engine
        honest = engine.loop.is_idle
        monkeypatch.setattr(engine.loop, "is_idle", lambda: self.is_there or honest())

    def end(self) -> None:
        """It is over, and the thread is woken."""
        self.is_there = False
        self._engine.loop.commands.waiters.wake()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[DynamicInferenceEngine]:
    monkeypatch.setattr(engine_process, "TICK_SECONDS", 0.01)
    with hash_engine(1, max_requests=2, block_size_tokens=4, block_count=64) as engine:
        yield engine


async def later(client: EngineClient) -> Snapshot:
    """A snapshot of which all was seen after now."""
    seen: list[Snapshot | None] = [client.snapshot]
    async with patience():
        while len(seen) < 3:
            await asyncio.sleep(0.001)
            if client.snapshot is not None and client.snapshot is not seen[-1]:
                seen.append(client.snapshot)
    assert seen[-1] is not None
    return seen[-1]


@contextlib.asynccontextmanager
async def watched(engine: DynamicInferenceEngine) -> AsyncIterator[tuple[EngineClient, Clock]]:
    clock = Clock()
    with engine_in_thread(engine, clock=clock) as endpoint:
        async with client_of(endpoint) as client:
            yield client, clock


def metric(snapshot: Snapshot, name: str) -> float | None:
    """Of one model, as Prometheus gets it."""
    metrics = ServerMetrics("tiny", EngineCollector("tiny", lambda: snapshot))
    return metrics.registry.get_sample_value(f"megatron_async_{name}", {"model_name": "tiny"})


def test_a_thread_that_sleeps_beside_a_request_is_noticed(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(engine, monkeypatch)

    async def test() -> None:
        async with watched(engine) as (client, clock):
            await outputs_of(client, [1], PARAMS)
            fault.is_there = True
            asked = asyncio.create_task(outputs_of(client, [2], PARAMS))
            await asyncio.sleep(0)
            async with patience():
                while not engine.loop.commands.waiting:
                    await asyncio.sleep(0.001)
            assert (await later(client)).stalled is None
            clock.now += STALL_SECONDS
            assert (await later(client)).stalled is None
            clock.now += 1.0
            snapshot = await later(client)
            assert snapshot.stalled is not None and "1 requests wait" in snapshot.stalled
            assert metric(snapshot, "engine_stalled") == 1
            assert metric(snapshot, "engine_stalls_total") == 1
            assert not asked.done()
            fault.end()
            ((output,),) = (await asked,)
            assert len(output.token_ids) == 5
            snapshot = await later(client)
            assert snapshot.stalled is None and metric(snapshot, "engine_stalled") == 0
            assert metric(snapshot, "engine_stalls_total") == 1

    run(test())


def test_a_paused_engine_does_not_stall_and_one_that_is_not_woken_does(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(engine, monkeypatch)

    async def test() -> None:
        async with watched(engine) as (client, clock):
            await control(client, "pause")
            asked = asyncio.create_task(outputs_of(client, [2], PARAMS))
            async with patience():
                while not engine.scheduler.has_unfinished:
                    await asyncio.sleep(0.001)
            clock.now += 1e6
            assert (await later(client)).stalled is None
            fault.is_there = True  # what it is woken by is lost
            await control(client, "resume")
            assert (await later(client)).stalled is None
            clock.now += STALL_SECONDS + 1
            assert (await later(client)).stalled is not None
            fault.end()
            await asked

    run(test())


def test_requests_that_are_paused_do_not_stall(engine: DynamicInferenceEngine) -> None:
    async def test() -> None:
        async with watched(engine) as (client, clock):
            await control(client, "suspend")
            asked = asyncio.create_task(outputs_of(client, [2], PARAMS))
            async with patience():
                while not engine.scheduler.has_unfinished:
                    await asyncio.sleep(0.001)
            (key,) = engine.outputs.keys
            engine.pause_request(key)
            await control(client, "resume")
            async with patience():
                while not engine.scheduler.table.held:
                    await asyncio.sleep(0.001)
            clock.now += 1e6
            assert (await later(client)).stalled is None
            engine.resume_request(key)
            await asked

    run(test())


def test_a_step_that_does_not_end_is_noticed_later(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, inside, goes_on = engine.loop.step, threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        step()

    monkeypatch.setattr(engine.loop, "step", slow)

    async def test() -> None:
        async with watched(engine) as (client, clock):
            asked = asyncio.create_task(outputs_of(client, [2], PARAMS))
            try:
                await asyncio.to_thread(inside.wait)
                assert (await later(client)).stalled is None
                clock.now += STALL_SECONDS * STEP_FACTOR
                assert (await later(client)).stalled is None
                clock.now += 1
                said = (await later(client)).stalled
                assert said is not None and "has not ended for 601 seconds" in said
            finally:
                goes_on.set()
            await asked
            assert (await later(client)).stalled is None

    run(test())


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end


def test_health_says_so_without_waiting_for_the_engine(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, clock = Fault(engine, monkeypatch), Clock()
    body = {"model": "small", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    with (
        serving(engine, NoParent(), clock) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as http,
    ):
        assert http.get("/health").status_code == 200
        fault.is_there = True
        thread = threading.Thread(target=lambda: http.post("/v1/completions", json=body))
        thread.start()
        try:
            until(lambda: bool(engine.loop.commands.waiting))
            assert http.get("/health").status_code == 200
            clock.now += STALL_SECONDS + 1
            for path in ("/health", "/v1/health"):
                until(lambda path=path: http.get(path).status_code == 503)  # type: ignore[misc]
            error = http.get("/health").json()["error"]
            assert error["code"] == "engine_stalled" and "taken no step" in error["message"]
            assert http.get("/v1/models").status_code == 200
        finally:
            fault.end()
            thread.join(PATIENCE_SECONDS)
        until(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=body).status_code == 200


def test_the_error_is_one_after_which_clients_may_come_again() -> None:
    from megatron_async.serving.http.errors import error_response

    response = error_response(EngineStalledError("it sleeps"))
    assert response.status_code == 503 and response.headers["retry-after"]
