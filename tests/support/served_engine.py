"""Engines behind a socket for tests: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RequestError
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.serving.engine_side.engine_process import EngineProcess
from megatron_async.serving.front_end.engine_client import EngineClient, gather
from megatron_async.serving.messages import Control, Endpoint, Generate, Kept, Launch, Output
from megatron_async.serving.supervisor import Supervisor
from tests.support.patience import PATIENCE_SECONDS

Result = TypeVar("Result")


class NoParent:
    """A supervisor that asks for nothing.

    Attributes:
        kept: the last that it was told to keep.
    """

    def __init__(self) -> None:
        self.kept: Kept | None = None

    def send(self, message: Any) -> None:
        """Keeps what the next process must know."""
        if isinstance(message, Kept):
            self.kept = message

    def beat(self) -> None:
        """Nobody looks."""


@contextlib.contextmanager
def engine_in_thread(
    engine: DynamicInferenceEngine,
    *,
    max_queue: int | None = None,
    kept: Kept | None = None,
    parent: NoParent | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Endpoint]:
    """The endpoint of ``engine``, served by a thread of this process; ``clock``: by which its
    requests stall."""
    endpoint = Endpoint.private()
    launch = Launch("", {}, endpoint, max_queue, kept=kept)
    told: Any = parent or NoParent()
    process = EngineProcess(engine, launch, told, clock)
    thread = threading.Thread(target=process.run, name="engine process")
    thread.start()
    try:
        yield endpoint
    finally:
        process.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        shutil.rmtree(endpoint.directory)


@contextlib.asynccontextmanager
async def client_of(endpoint: Endpoint) -> AsyncIterator[EngineClient]:
    """A client that the engine has answered."""
    client = EngineClient(endpoint)
    await client.connect()
    try:
        async with patience():
            await client.ready()
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def engine_process(
    *, max_queue: int | None = None, config: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Supervisor, EngineClient]]:
    """The embedded model in a process of its own, and a client of it."""
    fields = {"device": "cpu", **(config or {})}
    endpoint = Endpoint.private()
    launch = Launch("tiny", dataclasses.asdict(EngineConfig(**fields)), endpoint, max_queue)
    supervisor = Supervisor(launch, **options)
    try:
        async with patience():
            await supervisor.start()
        async with client_of(endpoint) as client:
            yield supervisor, client
    finally:
        await supervisor.stop()


def patience() -> asyncio.Timeout:
    """Ends what is stuck."""
    return asyncio.timeout(PATIENCE_SECONDS)


def run(test: Coroutine[Any, Any, Result]) -> Result:
    """Run a test's coroutine."""

    async def patiently() -> Result:
        async with patience():
            return await test

    return asyncio.run(patiently())


def checked(params: dict[str, Any]) -> CheckedParams:
    """What a front end makes of sampling parameters; raises RequestError."""
    return CheckedParams.of(SamplingParams.deserialize(params).checked())


async def outputs_of(
    client: EngineClient, prompt: list[int], params: dict[str, Any], **fields: Any
) -> list[Output]:
    """All that a request brings, one output for each sequence in order."""
    request = Generate(client.next_request_id(), prompt, checked(params), **fields)
    gathered = gather([output async for output in client.generate(request)])
    return sorted(gathered, key=lambda output: output.index)


async def control(client: EngineClient, name: str, **arguments: Any) -> dict[str, Any]:
    """Ask something of the whole engine."""
    return await client.command(Control(0, name, arguments))


async def until_idle(client: EngineClient) -> None:
    """Wait until the engine has nothing to do, and check that all has come back to it."""
    async with patience():
        while True:
            try:
                await control(client, "check_idle")
                return
            except RequestError as error:
                assert "not idle" in str(error)
                await asyncio.sleep(0.01)
