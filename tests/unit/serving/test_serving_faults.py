"""The engine process killed, frozen, orphaned and worn: its requests learn of it at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch

import megatron_async
from megatron_async.codec import Codec, encode
from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import CheckpointError, ConfigError, EngineDeadError
from megatron_async.processes.call import Call
from megatron_async.processes.child import Child
from megatron_async.processes.lifeline import EXIT_ORPHAN
from megatron_async.processes.messages import NotStarted, Started
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.messages import (
    Endpoint,
    Generate,
    Launch,
    ToSupervisor,
)
from megatron_async.serving.supervisor import ENGINE_MODULE, Supervisor
from tests.support.engines import hash_engine
from tests.support.hash_model import HashModel
from tests.support.served_engine import (
    checked,
    client_of,
    control,
    engine_in_thread,
    engine_process,
    outputs_of,
    run,
    until_idle,
)

TINY = Path(megatron_async.__file__).parent / "assets" / "tiny"


async def fails(client: EngineClient, prompt: list[int], count: int = 1500) -> None:
    """A request that would go on when the engine dies."""
    params = {"num_tokens_to_generate": count, "termination_id": -1}
    with pytest.raises(EngineDeadError):
        await outputs_of(client, prompt, params)


async def end_under_load(supervisor: Supervisor, client: EngineClient, number: int) -> None:
    """Send a signal to an engine with 16 requests, which all fail."""
    pid = supervisor.pid
    assert pid is not None
    tasks = [asyncio.create_task(fails(client, [65 + i])) for i in range(16)]
    while client.snapshot is None or not client.snapshot.gauges["requests_running"]:
        await asyncio.sleep(0.01)
    os.kill(pid, number)
    await asyncio.gather(*tasks)
    assert client.state != "ready" or supervisor.pid != pid


async def next_one(supervisor: Supervisor, client: EngineClient, starts: int) -> None:
    """Wait until the process after ``starts`` others serves."""
    while supervisor.starts == starts or supervisor.state != "ready":
        await asyncio.sleep(0.01)
    await client.ready()
    assert supervisor.starts == starts + 1


async def check_given_up(supervisor: Supervisor, client: EngineClient, starts: int) -> None:
    """Of ``starts`` processes the last one is dead, and there is no other."""
    while not supervisor.gave_up:
        await asyncio.sleep(0.01)
    assert supervisor.state == "dead" and supervisor.starts == starts
    assert "not started again" in await supervisor.given_up()
    while client.state == "ready":
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError):
        await outputs_of(client, [65], {})


def test_a_process_is_frozen_killed_and_given_up(tmp_path: Path) -> None:
    """Requests of a dead process fail. The next one has the last weights and is paused, even if
    its socket directory was removed meanwhile."""
    params = {"num_tokens_to_generate": 8, "temperature": 0.0}
    path = tmp_path / "some.safetensors"
    tiny = safetensors.torch.load_file(TINY / "model.safetensors")
    safetensors.torch.save_file({name: tensor * 0.5 for name, tensor in tiny.items()}, path)

    async def test() -> None:
        options = {"heartbeat_timeout": 2.0, "max_restarts": 2, "backoff": 0.01}
        async with engine_process(**options) as (supervisor, client):
            first = supervisor.pid
            assert first is not None and supervisor.starts == 1
            (before,) = await outputs_of(client, [65], params)

            await end_under_load(supervisor, client, signal.SIGSTOP)
            await next_one(supervisor, client, 1)
            assert not psutil.pid_exists(first)
            (output,) = await outputs_of(client, [65], params)
            assert output.token_ids == before.token_ids
            await until_idle(client)

            assert await control(client, "weights", path=str(path)) == {"weight_version": 1}
            (expected,) = await outputs_of(client, [65], params)
            assert expected.token_ids != before.token_ids
            await control(client, "suspend")
            shutil.rmtree(client.endpoint.directory)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            while client.state == "ready":
                await asyncio.sleep(0.01)
            await next_one(supervisor, client, 2)
            waits = asyncio.create_task(outputs_of(client, [65], params))
            while client.snapshot is None:
                await asyncio.sleep(0.01)
            assert client.snapshot.gauges["suspended"] == 1 and not waits.done()
            await control(client, "resume")
            ((after,),) = (await waits,)
            assert after.token_ids == expected.token_ids
            await until_idle(client)

            await end_under_load(supervisor, client, signal.SIGKILL)
            await check_given_up(supervisor, client, 3)

    run(test())


@pytest.mark.parametrize(
    ("name", "error"),
    [("CheckpointError", CheckpointError), ("ConfigError", ConfigError)]
    + [(name, EngineDeadError) for name in ("OSError", "Any", "annotations", "no_such")],
)
def test_the_error_that_kept_a_process_from_starting(name: str, error: type[Exception]) -> None:
    found = NotStarted(name, "because").to_error()
    assert type(found) is error and str(found) == "because"


def test_what_cannot_start_says_why() -> None:
    async def test() -> None:
        fields = dataclasses.asdict(EngineConfig(device="cpu", max_sequence_length=10**6))
        endpoint = Endpoint.private()
        supervisor = Supervisor(Launch("tiny", fields, endpoint))
        with pytest.raises(ConfigError, match="max_sequence_length"):
            await supervisor.start()
        assert supervisor.state == "dead" and supervisor.gave_up and supervisor.starts == 1
        await supervisor.stop()
        assert not os.path.exists(endpoint.directory)

    run(test())


def test_a_stop_does_not_wait_for_a_model_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async.serving.supervisor.STOP_SECONDS", 3600.0)

    async def test() -> None:
        fields = dataclasses.asdict(EngineConfig(device="cpu"))
        supervisor = Supervisor(Launch("tiny", fields, Endpoint.private()))
        start = asyncio.create_task(supervisor.start())
        while supervisor.pid is None:
            await asyncio.sleep(0)
        os.kill(supervisor.pid, signal.SIGSTOP)  # it loads for ever
        await supervisor.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await start

    run(test())


def test_a_process_without_a_supervisor_ends_and_ignores_a_terminals_signals() -> None:
    async def test() -> None:
        endpoint = Endpoint.private()
        fields = dataclasses.asdict(EngineConfig(device="cpu"))
        launch = Launch("tiny", fields, endpoint)
        child = Child(ENGINE_MODULE)
        call = Call(child.connection.detach())
        call.say(encode(launch))
        said = await asyncio.to_thread(call.recv_bytes)
        assert Codec[Any](ToSupervisor).decode(said) == Started()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid, number)
        async with client_of(endpoint) as client:
            await outputs_of(client, [65], {"num_tokens_to_generate": 3})
        call.close()
        status = await asyncio.to_thread(child.wait)
        assert status == EXIT_ORPHAN
        shutil.rmtree(endpoint.directory)

    run(test())


def test_an_error_in_a_step_reaches_all_requests() -> None:
    class Fails(HashModel):
        def forward(self, *arguments: Any) -> Any:
            raise ValueError("boom")

    async def test() -> None:
        engine = hash_engine(1, model=Fails(), max_requests=4, block_count=100)
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                for task in [asyncio.create_task(fails(client, [i], 200)) for i in range(1, 5)]:
                    await task

    run(test())


@pytest.mark.slow
def test_memory_stays_flat_over_2000_requests() -> None:
    async def test() -> None:
        # A small cache, so that all of its pages are in use before the first look.
        config = {"inference_async_scheduling": True, "max_requests": 64, "block_count": 80}
        async with engine_process(config=config) as (supervisor, client):
            processes = [psutil.Process(), psutil.Process(supervisor.pid)]

            async def some(count: int) -> list[int]:
                """Decode ``count`` requests, one in ten left early; resident bytes after them."""
                limit = asyncio.Semaphore(64)

                async def one(number: int) -> None:
                    params = {"num_tokens_to_generate": 4, "seed": number}
                    request = Generate(
                        client.next_request_id(), [65 + number % 50], checked(params)
                    )
                    async with limit, contextlib.aclosing(client.generate(request)) as outputs:
                        async for _ in outputs:
                            if number % 10 == 0:
                                break

                await asyncio.gather(*(one(number) for number in range(count)))
                await until_idle(client)
                return [process.memory_info().rss for process in processes]

            await some(500)
            before = await some(250)
            for _ in range(5):
                after = await some(250)
            grown = [now - then for then, now in zip(before, after, strict=True)]
            assert max(grown) < 5 * 2**20, grown  # 4 KiB for each request

    run(test())
