"""An ``EngineClient`` that says what it is told, under an HTTP front end without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx

from megatron_async.serving.http.app import make_app
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.messages import Control, EngineInfo, Generate, Output, Snapshot
from megatron_async.tokenizer.tokenizer import Tokenizer
from megatron_async.version import __version__
from tests.support.served import NotedMetrics, PlainTemplates, make_front

MAX_SEQUENCE_LENGTH = 4096


class ScriptedClient:
    """Says ``texts``, choice by choice in turns, and then ends.

    Args:
        texts: of the choices.
        sizes: tokens of each output, over and over.
        end: its finish reason; an exception is raised in its place.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        *,
        sizes: Sequence[int] = (1,),
        end: str | Exception = "stop",
    ) -> None:
        self.state = "ready"
        self.snapshot: Snapshot | None = None
        self.asked: list[Generate] = []
        self._tokenizer = tokenizer
        self._texts = texts
        self._sizes = sizes
        self._end = end

    def check_ready(self) -> None:
        """It is."""

    async def info(self) -> EngineInfo:
        """Of a model that is none."""
        size = self._tokenizer.vocab_size
        return EngineInfo("tiny", size, MAX_SEQUENCE_LENGTH, [], "float32", 1, 8, 64, __version__)

    async def generate(self, request: Generate) -> AsyncGenerator[Output, None]:
        """The texts, with invented log-probabilities."""
        self.asked.append(request)
        count = request.params["n"]
        left = [self._tokenizer.tokenize(self._texts[index]) for index in range(count)]
        turns = 0
        while any(left):
            for index, ids in enumerate(left):
                size = self._sizes[turns % len(self._sizes)]
                turns += 1
                part, left[index] = ids[:size], ids[size:]
                if part:
                    yield Output(request.request_id, index, part, None, self._log_probs(part))
        if isinstance(self._end, Exception):
            raise self._end
        for index in range(count):
            yield Output(request.request_id, index, [], finish_reason=self._end)

    async def abort(self, request_id: int) -> None:
        """It ends soon."""

    async def command(self, message: Control) -> dict[str, Any]:
        """There is nothing to control."""
        return {}

    def _log_probs(self, ids: list[int]) -> list[tuple[float, dict[int, float]]]:
        return [(-0.5 - token / 8, {token: -0.5 - token / 8, 65: -9.0}) for token in ids]


def tiny_tokenizer() -> Tokenizer:
    """The embedded model's, whose tokens are bytes."""
    assets = Path(__file__).parents[2] / "megatron_async" / "assets"
    return Tokenizer.from_directory(assets / "tiny")


def say(
    client: ScriptedClient, path: str, body: dict[str, Any], templates: Any = None
) -> httpx.Response:
    """The answer of a front end over ``client`` to ``body``.

    Args:
        templates: None for those that teach calls in Hermes' format.
    """
    config = ServerConfig(model_names=("tiny",))
    front = make_front(
        client,  # type: ignore[arg-type]
        config,
        client._tokenizer,
        templates or PlainTemplates("<tool_call>"),
        NotedMetrics(),
    )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(front), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            headers = {"content-type": "application/json"}
            return await http.post(path, content=json.dumps(body), headers=headers)

    return asyncio.run(ask())
