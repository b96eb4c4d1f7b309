"""An engine whose process dies while it sleeps: the next one takes no memory until it is woken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.sleep_mode import TAGS
from megatron_async.errors import BusyError, CacheTooLargeError, QueueFullError, RequestError
from megatron_async.serving.engine_side.asleep import SleepingEngine
from megatron_async.serving.engine_side.engine_process import EngineProcess
from megatron_async.serving.engine_side.sockets import Sockets
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.messages import Endpoint, Kept, Launch, Output
from tests.support.engines import hash_engine
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_engine import INFO
from tests.support.served_engine import (
    NoParent,
    client_of,
    control,
    engine_process,
    outputs_of,
    patience,
    run,
    until_idle,
)

GREEDY = {"num_tokens_to_generate": 8, "temperature": 0.0}


class Sleeper:
    """What a process does that is started in the place of one that slept."""

    def __init__(self, build: Callable[[], DynamicInferenceEngine], max_sequences: int) -> None:
        self.told = NoParent()
        self.endpoint = Endpoint.private()
        info = INFO.__class__("scripted", 256, 256, [], "float32", 1, 4, 64, "0", max_sequences)
        self._launch = Launch("", {}, self.endpoint, kept=Kept(asleep=TAGS), info=info)
        self._sockets = Sockets(self.endpoint)
        told: Any = self.told
        self._sleeping = SleepingEngine(self._launch, told, self._sockets, build)
        self._ends = [self._sleeping.stop]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        awake = self._sleeping.run()
        if awake is None:
            self._sockets.hang_up()
            self._sockets.close()
            return
        told: Any = self.told
        process = EngineProcess(awake.engine, self._launch, told, sockets=self._sockets)
        self._ends.append(process.stop)
        process.run(awake)

    def stop(self) -> None:
        self._ends[-1]()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        shutil.rmtree(self.endpoint.directory)


@contextlib.asynccontextmanager
async def asleep(
    build: Callable[[], DynamicInferenceEngine], max_sequences: int = 8
) -> AsyncIterator[tuple[EngineClient, NoParent]]:
    sleeper = Sleeper(build, max_sequences)
    try:
        async with client_of(sleeper.endpoint) as client:
            yield client, sleeper.told
    finally:
        await asyncio.to_thread(sleeper.stop)


def asks(client: EngineClient, **fields: Any) -> asyncio.Task[list[Output]]:
    return asyncio.create_task(outputs_of(client, [1, 2], GREEDY, **fields))


async def until_waiting(client: EngineClient, count: int) -> None:
    async with patience():
        while client.snapshot is None or client.snapshot.gauges["requests_waiting"] != count:
            await asyncio.sleep(0.01)


def never() -> DynamicInferenceEngine:
    raise AssertionError("nobody has woken it up")


def test_requests_wait_until_it_is_woken_up() -> None:
    async def test() -> None:
        engine = hash_engine(1, max_requests=4)
        async with asleep(lambda: engine) as (client, told):
            state = await control(client, "state")
            assert state | {"is_sleeping": True, "is_paused": True} == state
            first, aborted = asks(client), asks(client)
            await until_waiting(client, 2)
            aborted.cancel()
            await until_waiting(client, 1)
            assert await control(client, "wake_up") == {"is_sleeping": False}
            (output,) = await first
            assert len(output.token_ids) == 8
            assert told.kept == Kept()
            await until_idle(client)

    run(test())


def test_what_ends_requests_ends_those_that_wait() -> None:
    async def test() -> None:
        async with asleep(never, max_sequences=2) as (client, _):
            late, other = asks(client, timeout=0.01), asks(client)
            with pytest.raises(QueueFullError, match="2 may"):
                await asks(client)
            ((ended,),) = (await late,)
            assert ended.finish_reason == "timeout" and ended.token_ids == []
            assert await control(client, "abort_requests") == {"aborted": 1}
            ((ended,),) = (await other,)
            assert ended.finish_reason == "abort"
            with pytest.raises(RequestError, match="wake it up first"):
                await control(client, "resume")

    run(test())


def test_what_is_paused_while_it_sleeps_is_paused_when_it_wakes() -> None:
    async def test() -> None:
        engine = hash_engine(1, max_requests=4)
        async with asleep(lambda: engine) as (client, told):
            await control(client, "pause", mode="keep", timeout=None)
            assert told.kept == Kept(suspended=True, asleep=TAGS)
            await control(client, "wake_up", tags=None)
            state = await control(client, "state")
            assert state | {"is_sleeping": False, "is_paused": True} == state

    run(test())


def test_memory_that_somebody_else_has_can_be_asked_for_again() -> None:
    begun, free = threading.Event(), threading.Event()
    engine = hash_engine(1, max_requests=4)

    def build() -> DynamicInferenceEngine:
        begun.set()
        if free.is_set():
            return engine
        free.wait(PATIENCE_SECONDS)
        raise CacheTooLargeError("somebody else has the memory")

    async def test() -> None:
        async with asleep(build) as (client, _):
            waking = asyncio.create_task(control(client, "wake_up"))
            assert await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
            with pytest.raises(BusyError, match="wakes up already"):
                await control(client, "wake_up")
            free.set()
            with pytest.raises(RequestError, match="somebody else has the memory"):
                await waking
            assert await control(client, "wake_up") == {"is_sleeping": False}

    run(test())


def test_a_process_that_dies_asleep_is_followed_by_one_that_sleeps() -> None:
    async def test() -> None:
        async with engine_process(config={"enable_sleep_mode": True}) as (supervisor, client):
            (before,) = await outputs_of(client, [65], GREEDY)
            await control(client, "sleep", level=1, mode="keep")
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with patience():
                while client.state == "ready":
                    await asyncio.sleep(0.01)
                await client.ready()
            assert supervisor.pid != first
            await until_waiting(client, 0)
            assert client.snapshot is not None and "blocks_total" not in client.snapshot.gauges
            waits = asyncio.create_task(outputs_of(client, [65], GREEDY))
            await until_waiting(client, 1)
            assert await control(client, "wake_up", tags=["weights"]) == {"is_sleeping": True}
            assert await control(client, "wake_up", tags=None) == {"is_sleeping": False}
            ((after,),) = (await waits,)
            assert after.token_ids == before.token_ids

    run(test())
