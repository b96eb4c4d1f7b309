"""What Triton's tests of its OpenAI frontend import: the frontend's starters, and a test client."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import httpx
import openai

from scripts.peer_suites.servers import SERVERS, NotServedError, Server
from scripts.peer_suites.stand_ins import give, stand_for

MODEL = "tiny"
ENVIRONMENT = {
    "TEST_BACKEND": "vllm",
    "TEST_MODEL": MODEL,
    "TEST_MODEL_REPOSITORY": "none",
    "TEST_TOKENIZER": MODEL,
}
"""What their ``conftest.py`` asks for. The frontend passes what vLLM answers."""

WITHOUT_EFFECT = ("--model-repository", "--tokenizer", "--backend")
FLAGS = ("--enable-kserve-frontends",)
SECONDS = 120


def options(arguments: list[str]) -> list[str]:
    """This server's options for those of their frontend.

    Raises:
        NotServedError: for an option that has no counterpart.
    """
    found: list[str] = ["--served-model-name", MODEL]
    left = list(arguments)
    while left:
        name = left.pop(0)
        if name in FLAGS:
            continue
        value = left.pop(0) if left else ""
        if name == "--tool-call-parser":
            found += ["--tool-call-format", value]
        elif name not in WITHOUT_EFFECT:
            raise NotServedError(name)
    return found


class OpenAIServer:
    """A server for the ``with`` block of a fixture. It is shared, and lives on afterwards."""

    API_KEY = "EMPTY"

    def __init__(self, cli_args: list[Any], **others: Any) -> None:
        self._server = SERVERS.get(options([str(argument) for argument in cli_args]))
        self.url_root = self._server.url

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.API_KEY, timeout=SECONDS)

    def get_async_client(self) -> openai.AsyncOpenAI:
        """One client is for tests that each have a loop of their own: it keeps no connection."""
        http = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0))
        named = {"base_url": self.url_for("v1"), "api_key": self.API_KEY, "timeout": SECONDS}
        return openai.AsyncOpenAI(**named, http_client=http)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ModelRepository:
    """Stands for a server of theirs that runs below the frontend."""

    path: str

    def stop(self) -> None:
        pass


def setup_server(model_repository: str, **others: Any) -> ModelRepository:
    """Their models; ours are in the server."""
    return ModelRepository(model_repository)


def setup_fastapi_app(tokenizer: str, server: Any, backend: str | None, **others: Any) -> Server:
    """A server in place of an application."""
    parser = others.get("tool_call_parser")
    return SERVERS.get(options(["--tool-call-parser", parser] if parser else []))


def make_client(app: Server) -> httpx.Client:
    """In place of FastAPI's client of an application."""
    return httpx.Client(base_url=app.url, timeout=SECONDS)


def install(checkout: Path) -> None:
    """Make the stand-ins importable, in this process alone."""
    os.environ.update(ENVIRONMENT)
    stand_for("tritonserver", "frontend", "engine", "schemas", "utils", "openai_frontend")
    given: dict[str, Any] = {"setup_server": setup_server, "setup_fastapi_app": setup_fastapi_app}
    give("tests.utils", OpenAIServer=OpenAIServer, **given)
    give("fastapi.testclient", TestClient=make_client)
