"""``python -m tests.support.fake_server TIMEOUT [stuck|dies|stays|logs]``: the HTTP server by
itself, in a process whose engine is a script and imports no torch. The first line of its output is
its URL. ``stuck`` generates nothing after the first output. With ``dies`` and ``stays`` the engine
is given up as soon as a request has begun, and with ``stays`` the server goes on. ``logs`` has a
line on stderr for each request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from megatron_async.errors import EngineGivenUpError
from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.http.frontend import Frontend, ServerConfig
from megatron_async.serving.http.http_server import open_socket, run, serve, url_of
from megatron_async.serving.http.logs import log_as_json
from megatron_async.serving.messages import Control, EngineInfo, Generate, Output, Snapshot
from megatron_async.version import __version__

TICK_SECONDS = 0.001


class ScriptedEngine:
    """Client and supervisor of an engine that says "a" at every step."""

    def __init__(self, *, is_stuck: bool) -> None:
        self.state = "starting"
        self.snapshot: Snapshot | None = None
        self._is_stuck = is_stuck
        self._aborts: dict[int, asyncio.Event] = {}
        self._begun = asyncio.Event()
        self._reason: str | None = None

    async def start(self) -> None:
        """Serve."""
        self.state = "ready"

    async def given_up(self) -> str:
        """As soon as a request has begun, if it dies."""
        if sys.argv[2:] not in (["dies"], ["stays"]):
            await asyncio.get_running_loop().create_future()
        await self._begun.wait()
        return "the engine is given up"

    def give_up(self, reason: str) -> None:
        """As the client's, but that requests go on."""
        self._reason = reason

    def check_ready(self) -> None:
        """As the client's."""
        if self._reason is not None:
            raise EngineGivenUpError(self._reason)

    async def stop(self) -> None:
        """The server has ended."""
        self.state = "dead"

    async def connect(self) -> None:
        """It is there."""

    async def ready(self) -> None:
        """Nothing is to be waited for."""

    async def aclose(self) -> None:
        """What is left ends."""
        for aborted in self._aborts.values():
            aborted.set()

    async def info(self) -> EngineInfo:
        """Of a model that is none."""
        return EngineInfo("tiny", 256, 4096, [], "float32", 1, 4, 64, __version__)

    async def generate(self, request: Generate) -> AsyncGenerator[Output, None]:
        """As many outputs as are asked for, unless the request is aborted."""
        aborted = self._aborts[request.request_id] = asyncio.Event()
        self._begun.set()
        most = request.params["num_tokens_to_generate"]
        try:
            for number in range(1, most + 1):
                stuck = self._is_stuck and number > 1
                if stuck:
                    await aborted.wait()
                await asyncio.sleep(TICK_SECONDS)
                reason = "abort" if aborted.is_set() else "length" if number == most else None
                ids = [] if reason == "abort" else [97]
                yield Output(request.request_id, 0, ids, finish_reason=reason)
                if reason is not None:
                    return
        finally:
            del self._aborts[request.request_id]

    async def abort(self, request_id: int) -> None:
        """End a request."""
        self._aborts[request_id].set()

    async def command(self, message: Control) -> dict[str, Any]:
        """There is nothing to control."""
        return {}


class NoMetrics:
    """Metrics that keep nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Letters:
    """A tokenizer of ASCII."""

    def tokenize(self, text: str, add_bos: bool = False, **options: Any) -> list[int]:
        return list(text.encode())

    def stream_after(self, prompt: list[int], skip_special_tokens: bool = True) -> Any:
        return SimpleNamespace(push=chr, flush=str)


async def main() -> bool:
    """Serve until a signal comes."""
    engine, letters = ScriptedEngine(is_stuck=sys.argv[2:] == ["stuck"]), Letters()
    tokenizer: Any = letters
    metrics: Any = NoMetrics()
    front = Frontend(
        config=ServerConfig(
            model_names=("tiny",),
            shutdown_timeout=float(sys.argv[1]),
            stays_without_engine=sys.argv[2:] == ["stays"],
        ),
        generator=Generator(engine, tokenizer, metrics),
        tokenizer=tokenizer,
        chat=Chat(tokenizer),
        token_names=TokenNames(tokenizer),
        metrics=metrics,
    )
    if sys.argv[2:] == ["logs"]:
        log_as_json()
    listening = open_socket("127.0.0.1", 0)
    return await serve(
        front,
        engine,
        engine,
        listening,
        on_ready=lambda: print(url_of(listening), flush=True),
    )


if __name__ == "__main__":
    sys.exit(0 if run(main()) else 1)
