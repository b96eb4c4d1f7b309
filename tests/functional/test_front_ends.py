"""Two front ends over one engine, each of them stopped (SIGSTOP) while the other one is asked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from megatron_async.errors import FrontEndDeadError
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.front_end import front_ends
from megatron_async.serving.front_end.build import FrontendSettings
from megatron_async.serving.front_end.front_ends import FrontEnds
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.http.http_server import open_socket
from megatron_async.serving.messages import Endpoint
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import url_in

ROOT = Path(__file__).parents[2]
KEY = {"authorization": "Bearer key"}
ROWS, QUEUE = 4, 28
"""So 32 sequences may run or wait, over all front ends."""


class Server:
    """A running ``megatron-async serve --api-server-count 2``."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def front_ends(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "front_end_process" in " ".join(each.cmdline())]

    @contextlib.contextmanager
    def only(self, one: psutil.Process) -> Iterator[None]:
        """New connections are accepted by ``one`` alone."""
        others = [each for each in self.front_ends if each.pid != one.pid]
        for other in others:
            other.suspend()
            while other.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
        try:
            yield
        finally:
            for other in others:
                other.resume()

    def post(self, path: str, **asked: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", headers=KEY, timeout=PATIENCE_SECONDS, **asked)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_SECONDS)

    def metric(self, name: str) -> float:
        """The sum over labels; -1 when it is not there."""
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"megatron_async_{name}{{")]
        return sum(float(line.split()[-1]) for line in lines) if lines else -1.0

    async def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not await asyncio.to_thread(holds):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ["--inference-async-scheduling", "--port", "0", "--api-key", "key"]
    options += ["--api-server-count", "2", "--max-queue", str(QUEUE), "--heartbeat-timeout", "0"]
    options += ["--inference-dynamic-batching-max-requests", str(ROWS)]
    command = [sys.executable, "-m", "megatron_async", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = url_in(process.stderr)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # of its log
            yield Server(process, url)
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def asked(number: int, tokens: int) -> dict[str, Any]:
    prompt = f"def f{number}(x):\n"
    sampled = {"seed": number, "temperature": number % 2, "max_tokens": tokens}
    return {"prompt": prompt, **sampled, "ignore_eos": True, "stream": True}


Serial = Callable[[range, int], list[str]]


@pytest.fixture(scope="module")
def serial() -> Iterator[Serial]:
    """The text of each request by itself."""
    from megatron_async.engine.engine import DynamicInferenceEngine

    def texts(numbers: range, tokens: int) -> list[str]:
        made = []
        for number in numbers:
            params = SamplingParams(
                seed=number,
                temperature=float(number % 2),
                num_tokens_to_generate=tokens,
                ignore_eos=True,
            )
            (request,) = engine.generate([asked(number, tokens)["prompt"]], params)
            made.append(request.generated_text or "")
        return made

    with DynamicInferenceEngine.from_pretrained("tiny", config_at(0, max_requests=1)) as engine:
        yield texts


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[str, str]:
    """The text, and how it ended."""
    text, reason = "", ""
    body = asked(number, tokens)
    async with client.stream("POST", "/v1/completions", json=body, headers=KEY) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason


@contextlib.asynccontextmanager
async def streams(server: Server, tokens: int) -> AsyncIterator[Callable[..., asyncio.Task[Any]]]:
    """Starts streams with connections of their own."""
    limits = httpx.Limits(max_keepalive_connections=0, max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits
    ) as client:
        yield lambda number: asyncio.create_task(stream(client, number, tokens))


async def half_at_each(server: Server, start: Callable[..., Any], each: int) -> list[Any]:
    """While the engine is paused: ``each`` streams at one front end, as many at the other."""
    tasks = []
    await server.until(lambda: server.metric("num_requests_waiting") == 0)
    for turn, front_end in enumerate(server.front_ends):
        with server.only(front_end):
            tasks += [start(turn * each + number) for number in range(each)]
            so_far = (turn + 1) * each
            await server.until(lambda all=so_far: server.metric("num_requests_waiting") == all)
    return tasks


def test_32_streams_over_two_front_ends_are_serial_decoding(server: Server, serial: Serial) -> None:
    before = max(server.metric("request_success_total"), 0.0)

    async def test() -> list[tuple[str, str]]:
        one, other = server.front_ends
        async with streams(server, 12) as start:
            with server.only(one):
                assert server.post("/pause").json() == {"suspended": True}
            tasks = await half_at_each(server, start, 16)
            with server.only(one):  # which has 16 of them
                full = server.post("/v1/completions", json={"prompt": "a"})
                assert full.status_code == 429 and "32 may" in full.json()["error"]["message"]
            with server.only(other):
                assert server.metric("suspended") == 1
                assert server.metric("http_requests_open") == 32
                assert server.post("/resume").json() == {"suspended": False}
            return await asyncio.gather(*tasks)

    got = asyncio.run(test())
    assert got == [(text, "length") for text in serial(range(32), 12)]
    for front_end in server.front_ends:
        with server.only(front_end):
            assert server.metric("request_success_total") == before + 32
            assert server.metric("request_generation_tokens_count") >= 32
            assert server.metric("http_requests_open") == 0
            assert server.metric("requests_refused_total") >= 1


def test_a_front_end_that_is_killed_is_started_again_and_hurts_no_other(
    server: Server, serial: Serial
) -> None:
    async def test() -> tuple[list[Any], list[Any]]:
        killed, left = server.front_ends
        async with streams(server, 12) as start:
            with server.only(left):
                assert server.post("/pause").status_code == 200
            tasks = await half_at_each(server, start, 4)
            killed.kill()
            lost = await asyncio.gather(*tasks[:4], return_exceptions=True)
            # The engine process has aborted what was the killed one's.
            await server.until(lambda: server.metric("num_requests_waiting") == 4)
            assert server.post("/resume").status_code == 200
            kept = await asyncio.gather(*tasks[4:])
        await server.until(lambda: len(server.front_ends) == 2)
        (new,) = [each for each in server.front_ends if each.pid != left.pid]
        with server.only(new):
            await server.until(lambda: server.get("/health").status_code == 200)
            answer = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] == 2
            assert server.metric("http_requests_open") == 0
        return lost, kept

    lost, kept = asyncio.run(test())
    assert all(isinstance(error, httpx.TransportError) for error in lost)
    assert kept == [(text, "length") for text in serial(range(4, 8), 12)]


def test_sigterm_lets_the_streams_of_all_front_ends_end(server: Server, serial: Serial) -> None:
    children = psutil.Process(server.process.pid).children()

    async def test() -> list[Any]:
        async with streams(server, 30) as start:
            with server.only(server.front_ends[0]):
                server.post("/pause")
            tasks = await half_at_each(server, start, 4)
            server.post("/resume")
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    got = asyncio.run(test())
    assert got == [(text, "length") for text in serial(range(8), 30)]
    assert server.process.wait(PATIENCE_SECONDS) == 0
    assert not any(child.is_running() for child in children)
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FrontEnds]]:
    """Front ends of ``tests.support.stub_front_end``."""
    monkeypatch.setattr(front_ends, "MODULE", "tests.support.stub_front_end")
    endpoint = Endpoint.private()
    config = ServerConfig(model_names=("stub",))

    def made(model: str, max_restarts: int, **limits: Any) -> FrontEnds:
        settings = FrontendSettings(model=model, endpoint=endpoint, config=config)
        listening = open_socket("127.0.0.1", 0)
        limits = {"max_restarts": max_restarts, "backoff": 0.01, **limits}
        return FrontEnds(settings, listening, 2, **limits)

    yield made
    endpoint.remove()


def test_a_front_end_that_keeps_dying_ends_the_server(stubs: Callable[..., FrontEnds]) -> None:
    async def test() -> None:
        with pytest.raises(FrontEndDeadError, match="ended with status 7; it is not started again"):
            await stubs("hasty", 1).run()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


def test_each_front_end_learns_that_the_engine_was_given_up(
    stubs: Callable[..., FrontEnds],
) -> None:
    async def test() -> None:
        several = stubs("patient", 1)
        serving = asyncio.create_task(several.run())
        await several.ready()
        several.give_up("it died too often")
        # The first ones, and those that are started in their place.
        with pytest.raises(FrontEndDeadError, match="ended with status 8; it is not started again"):
            await serving

    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


def test_a_front_end_that_stands_still_is_killed_and_started_again(
    stubs: Callable[..., FrontEnds], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with pytest.raises(FrontEndDeadError, match=r"gave no sign of life for 0\.2 seconds"):
            await stubs("frozen", 1, heartbeat_timeout=0.2).run()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))
    assert any("it is started again" in said for said in caplog.messages)


def test_front_ends_that_do_not_serve_yet_are_not_waited_for(
    stubs: Callable[..., FrontEnds],
) -> None:
    async def test() -> None:
        several = stubs("slow", 1)
        several.config = dataclasses.replace(several.config, shutdown_timeout=3600.0)
        serving = asyncio.create_task(several.run())
        while len(several.pids) < 2:
            await asyncio.sleep(0.01)
        several.end()
        await serving

    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))
