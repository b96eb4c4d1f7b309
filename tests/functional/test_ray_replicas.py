"""Four replicas of the embedded model under Ray Serve: one server to its clients, whatever becomes
of them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import megatron_async
from megatron_async.config.engine_config import EngineConfig
from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import RealServer, real_server
from tests.support.served_engine import run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
TINY = Path(megatron_async.__file__).parent / "assets" / "tiny"
KEY = {"authorization": "Bearer key"}
LONG = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}


@contextlib.asynccontextmanager
async def replicas(count: int, *options: str) -> AsyncIterator[RealServer]:
    """A server whose replicas all serve."""
    common = ["--device", "cpu", "--inference-async-scheduling", "--api-key", "key"]
    async with real_server("--replicas", str(count), *common, *options) as server:
        server.http.headers.update(KEY)
        await until_ready(server, count)
        yield server


async def by_replica(server: RealServer, name: str) -> dict[str, float]:
    text = (await server.http.get("/metrics")).text
    found = re.findall(rf'^megatron_async_{name}{{.*replica="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


async def until_ready(server: RealServer, count: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum((await by_replica(server, "engine_ready")).values()) != count:
            await asyncio.sleep(0.1)


async def total(server: RealServer, name: str) -> float:
    text = (await server.http.get("/metrics")).text
    return sum(map(float, re.findall(rf"^megatron_async_{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def actors(server: RealServer) -> list[psutil.Process]:
    """The processes of the replicas, each of which has one of an engine."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in found if "ServeReplica" in each.name() and each.children()]


def prompt(number: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"def f{number}(x):\n", **LONG}


async def streamed(server: RealServer, body: dict[str, Any]) -> str:
    """The text of a stream, or the code of the error that ended it."""
    try:
        return await server.text({**body, "stream": True})
    except InterruptedError as error:
        return f"error: {error}"


def test_clients_see_one_server_however_its_replicas_fare() -> None:
    async def test() -> None:
        async with real_server("--device", "cpu", "--api-key", "key") as one:
            one.http.headers.update(KEY)
            expected = [(await one.text({**prompt(i), "stream": True})) for i in range(4)]
            page = (await one.http.get("/openapi.json")).json()
            wrong = [await one.http.post("/v1/completions", json=b) for b in WRONG]
        async with replicas(4) as server:
            assert (await server.http.get("/openapi.json")).json() == page
            for body, answer in zip(WRONG, wrong, strict=True):
                same = await server.http.post("/v1/completions", json=body)
                assert (same.status_code, same.json()) == (answer.status_code, answer.json())
            await spread(server, expected)
            await killed_under_load(server, expected)
            await change_of_weights(server, expected)

    run(test())


WRONG: list[dict[str, Any]] = [
    {"model": "other", "prompt": "a"},
    {"model": "tiny", "prompt": "a", "temperature": -1},
    {"model": "tiny", "prompt": ""},
    {"model": "tiny", "prompt": "a", "max_tokens": 10**6},
]


async def spread(server: RealServer, expected: list[str]) -> None:
    """All replicas work, each text is that of one engine, and one page shows them."""
    texts = await asyncio.gather(*(streamed(server, prompt(i % 4)) for i in range(32)))
    assert texts == [expected[i % 4] for i in range(32)]
    await asyncio.sleep(1)  # for the last snapshots, which nobody waits for
    tokens = await by_replica(server, "generation_tokens_total")
    assert len(tokens) == 4 and min(tokens.values()) > 0
    assert sum(tokens.values()) == 32 * LONG["max_tokens"]


async def killed_under_load(server: RealServer, expected: list[str]) -> None:
    """Streams of the killed replica that have begun end with an error; all others are whole. It is
    replaced, and its requests that had not begun were tried again."""
    tasks = [asyncio.ensure_future(streamed(server, prompt(i % 4))) for i in range(32)]
    while await total(server, "http_requests_open") < 32:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    victims = actors(server)
    assert len(victims) == 4
    victims[0].kill()
    more = [asyncio.ensure_future(streamed(server, prompt(i % 4))) for i in range(16)]
    texts = await asyncio.gather(*tasks)
    failed = [text for text in texts if text.startswith("error")]
    assert 0 < len(failed) < 32 and set(failed) == {"error: engine_not_ready"}
    assert all(t == expected[i % 4] for i, t in enumerate(texts) if t not in failed)
    assert await asyncio.gather(*more) == [expected[i % 4] for i in range(16)]
    await until_ready(server, 4)


async def change_of_weights(server: RealServer, expected: list[str]) -> None:
    """Under load, one replica after the other; a replica that is replaced later has them too."""
    tasks = [asyncio.ensure_future(streamed(server, prompt(i % 4))) for i in range(24)]
    bad = await server.http.post("/weights", json={"path": "/nowhere"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "path"
    changed = await server.http.post("/weights", json={"path": str(TINY)})
    assert changed.json() == {"weight_version": 1}
    assert await asyncio.gather(*tasks) == [expected[i % 4] for i in range(24)]
    actors(server)[0].kill()
    end = time.monotonic() + PATIENCE_SECONDS
    while list((await by_replica(server, "weight_version")).values()) != [1.0] * 4:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    await until_ready(server, 4)


def test_without_retries_a_request_fails_with_its_replica() -> None:
    async def test() -> None:
        async with replicas(2, "--replica-retries", "0") as server:
            await server.http.post("/pause")  # so that nothing is sent
            bodies = [{**prompt(i), "max_tokens": 3} for i in range(8)]
            asked = [server.http.post("/v1/completions", json=body) for body in bodies]
            tasks = [asyncio.ensure_future(each) for each in asked]
            while await total(server, "num_requests_waiting") < 8:
                await asyncio.sleep(0.05)
            actors(server)[0].kill()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await server.http.post("/resume")
            statuses = collections.Counter(
                [each.status_code for each in await asyncio.gather(*tasks)]
            )
            assert statuses[503] > 0 and statuses[200] > 0 and set(statuses) == {200, 503}
            answer = done.pop().result()
            assert answer.status_code == 503 and "Retry-After" in answer.headers
            assert "the replica that served this request has died" in answer.text
            assert await total(server, "requests_retried_total") == 0

    run(test())


# --- an application for Ray's own proxy -------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray
    from ray import serve

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"port": 8555})
    yield
    ray.shutdown()


def test_the_application_serves_in_another_one_and_scales(cluster: None) -> None:
    from ray import serve

    from megatron_async.replicas.engine_replica import ReplicaSettings
    from megatron_async.replicas.ray_serve import Plan, application
    from megatron_async.serving.front_end.build import FrontendSettings
    from megatron_async.serving.http.frontend import ServerConfig

    config = EngineConfig(device="cpu", inference_async_scheduling=True, max_requests=8)
    settings = ReplicaSettings(
        model="tiny", config=dataclasses.asdict(config), across_hosts=True, shutdown_timeout=60
    )
    front = FrontendSettings(model="tiny", config=ServerConfig(model_names=("tiny",)))
    plan = Plan(max_replicas=2, target_requests=4, upscale_seconds=0, downscale_seconds=0)
    serve.run(application(settings, front, plan), name="ours", route_prefix="/ours")
    url = "http://127.0.0.1:8555/ours"

    async def test() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as http:
            while (await http.get(f"{url}/health")).status_code != 200:
                await asyncio.sleep(0.1)

            async def one(number: int, tokens: int) -> int:
                body = {**prompt(number), "max_tokens": tokens, "stream": True}
                chunks = 0
                async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            assert "choices" in json.loads(line.removeprefix("data: "))
                            chunks += 1
                return chunks

            assert await one(1, 20) > 5  # it streams

            async def ready() -> int:
                text = (await http.get(f"{url}/metrics")).text
                return int(float(re.findall(r"replicas_ready{.*} (\S+)", text)[0]))

            stop = asyncio.Event()

            async def keep(number: int) -> None:
                while not stop.is_set():
                    assert await one(number, 200) > 0

            load = [asyncio.ensure_future(keep(number)) for number in range(12)]
            while await ready() < 2:
                await asyncio.sleep(0.5)
                assert not any(task.done() for task in load)
            stop.set()
            await asyncio.gather(*load)
            lasting = asyncio.ensure_future(one(3, 1000))
            while await ready() > 1:
                await asyncio.sleep(0.5)
            assert await lasting > 0

    run(test())
    serve.delete("ours")
