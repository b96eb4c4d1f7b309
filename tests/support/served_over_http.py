"""A server in this process whose engine stands behind the sockets of its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.endpoints.log_prob_shapes import TokenNames
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.no_tokenizer import NoTemplates, NoTokenizer, TokenIds
from megatron_async.serving.http.app import make_app
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.http.http_server import open_socket, url_of
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_client import tiny_tokenizer
from tests.support.served import NotedMetrics, make_front
from tests.support.served_engine import NoParent, engine_in_thread


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(
    engine: DynamicInferenceEngine,
    parent: NoParent,
    clock: Callable[[], float] = time.monotonic,
    *,
    has_text: bool = False,
    **config: Any,
) -> Iterator[str]:
    """Its URL; ``config`` is of ServerConfig, ``clock`` of :func:`engine_in_thread`. It takes token
    ids alone, unless it has the texts of the embedded model."""
    listening = open_socket("127.0.0.1", 0)
    listening.listen()  # clients may connect before the server accepts
    servers: list[uvicorn.Server] = []
    started = threading.Event()

    async def main(endpoint: Any) -> None:
        parts: tuple[Any, Any, Any] = (NoTokenizer(), NoTemplates(), TokenIds)
        if has_text:
            parts = (tiny_tokenizer(), ChatTemplates.from_directory("tiny"), TokenNames)
        tokenizer, templates, names = parts
        client: Any = EngineClient(endpoint)
        await client.connect()
        await client.ready()
        settings = ServerConfig(model_names=("small",), **config)
        front = make_front(client, settings, tokenizer, templates, NotedMetrics(), names)
        servers.append(uvicorn.Server(uvicorn.Config(make_app(front), log_config=None)))
        asyncio.get_running_loop().call_soon(started.set)
        await servers[0].serve(sockets=[listening])
        await client.aclose()

    with engine_in_thread(engine, parent=parent, clock=clock) as endpoint:
        thread = threading.Thread(target=lambda: asyncio.run(main(endpoint)))
        thread.start()
        try:
            assert started.wait(PATIENCE_SECONDS)
            yield url_of(listening)
        finally:
            servers[0].should_exit = True
            thread.join(PATIENCE_SECONDS)
