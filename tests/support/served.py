"""The HTTP front end in a thread of its own, on a port that the system chooses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import uvicorn

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RequestError
from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.http.app import make_app
from megatron_async.serving.http.frontend import Frontend, ServerConfig
from megatron_async.serving.http.http_server import open_socket, url_of
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.fake_engine_client import FakeEngineClient
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS

T = TypeVar("T")


class PlainTemplates:
    """Chat templates whose prompt is each role and text, between colons and commas."""

    def __init__(self, source: str = "{{ messages }}") -> None:
        self._source = source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{number}].role=None must be a text such as 'user'")
        said = [f"{message['role']}:{message.get('content')}," for message in messages]
        return "".join(said) + ("" if options.get("add_generation_prompt") is False else "a:")

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        return self._source


class NotedMetrics:
    """Metrics that keep what they are told, in order."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, Any]] = []

    def text(self) -> bytes:
        return b"# TYPE noted gauge\n"

    def opened(self) -> None:
        self.noted.append(("opened", None))

    def closed(self) -> None:
        self.noted.append(("closed", None))

    def refused(self, status: int) -> None:
        self.noted.append(("refused", status))

    def first_token(self, seconds: float) -> None:
        self.noted.append(("first_token", seconds))

    def tokens(self, count: int, seconds: float) -> None:
        self.noted.append(("tokens", (count, seconds)))

    def finished(self, reason: str, usage: dict[str, float] | None, seconds: float) -> None:
        self.noted.append(("finished", (reason, usage, seconds)))


class Served:
    """A running server.

    Attributes:
        url: where.
        client: what it takes for the engine process.
        front: its parts.
        metrics: what they were told.
    """

    def __init__(
        self, url: str, front: Frontend, client: FakeEngineClient, metrics: NotedMetrics, loop: Any
    ) -> None:
        self.url = url
        self.front = front
        self.client = client
        self.metrics = metrics
        self._loop = loop

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds in the server's event loop."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(PATIENCE_SECONDS)

    def call(self, action: Callable[[], T]) -> T:
        """The result of ``action`` in the server's event loop."""

        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the server's event loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)


def make_front(
    client: FakeEngineClient,
    config: ServerConfig,
    tokenizer: Tokenizer,
    templates: Any,
    metrics: NotedMetrics,
    token_names: type[TokenNames] = TokenNames,
) -> Frontend:
    """The parts of a front end."""
    return Frontend(
        config=config,
        generator=Generator(
            client,
            tokenizer,
            metrics,
            request_timeout=config.request_timeout,
            shows_aborts=config.shows_aborts,
        ),
        tokenizer=tokenizer,
        chat=templates if isinstance(templates, Chat) else Chat(templates or PlainTemplates()),
        token_names=token_names(tokenizer),
        metrics=metrics,
    )


@contextlib.contextmanager
def served(
    engine: DynamicInferenceEngine,
    *,
    tokenizer: Tokenizer | None = None,
    templates: Any = None,
    tracer_provider: Any = None,
    token_names: type[TokenNames] = TokenNames,
    **config: Any,
) -> Iterator[Served]:
    """A server over ``engine``; ``config`` is of ServerConfig."""
    tokenizer = tokenizer or hash_tokenizer()
    config.setdefault("model_names", ("tiny", "small"))
    started: threading.Event = threading.Event()
    made: list[Served] = []
    metrics = NotedMetrics()
    servers: list[uvicorn.Server] = []
    listening = open_socket("127.0.0.1", 0)
    listening.listen()  # clients may connect before the server accepts
    url = url_of(listening)

    async def main() -> None:
        client = FakeEngineClient(engine)
        front = make_front(
            client, ServerConfig(**config), tokenizer, templates, metrics, token_names
        )
        made.append(Served(url, front, client, metrics, asyncio.get_running_loop()))
        app = make_app(front, tracer_provider=tracer_provider)
        options = uvicorn.Config(app, log_config=None, access_log=False)
        servers.append(uvicorn.Server(options))
        asyncio.get_running_loop().call_soon(started.set)
        await servers[0].serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="http server")
    thread.start()
    try:
        assert started.wait(PATIENCE_SECONDS)
        yield made[0]
    finally:
        servers[0].should_exit = True
        thread.join(PATIENCE_SECONDS)
        engine.close()
