"""What Megatron-LM's tests of its server and its parameters import: their server, and ours."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from megatron_async.megatron_api import SamplingParams
from scripts.peer_suites.servers import SERVERS, Server
from scripts.peer_suites.shims.tiny import tokenizer
from scripts.peer_suites.stand_ins import give, stand_for

HOME = "megatron.core.inference.text_generation_server"
GENERATORS = {
    "/api": f"{HOME}.text_generation_server",
    "/completions": f"{HOME}.endpoints.completions",
}
"""Modules whose ``send_do_generate`` is called for a request that is taken; tests count that."""
SECONDS = 120


class Answer:
    """An answer as Flask's test client has it."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status_code = response.status_code
        self.is_json = response.headers["content-type"].startswith("application/json")

    def get_json(self) -> Any:
        return self._response.json()


class Client:
    """Flask's test client, which asks our server."""

    def __init__(self, server: Server) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=SECONDS)

    def put(self, path: str, json: Any) -> Answer:
        return self._ask("PUT", path, json)

    def post(self, path: str, json: Any) -> Answer:
        return self._ask("POST", path, json)

    def _ask(self, method: str, path: str, body: Any) -> Answer:
        answer = Answer(self._http.request(method, path, json=body))
        if answer.status_code == httpx.codes.OK:
            importlib.import_module(GENERATORS[path]).send_do_generate()
        return answer


class MegatronServer:
    """A server in place of an application over their engine."""

    def __init__(self, engine: Any) -> None:
        self.app = self

    def test_client(self) -> Client:
        return Client(SERVERS.get([]))


class EngineHarness:
    """Has the places of their engine that a test writes to."""

    def __init__(self) -> None:
        wrapped = SimpleNamespace(model=SimpleNamespace())
        controller = SimpleNamespace(inference_wrapped_model=wrapped)
        self.static_engine = SimpleNamespace(controller=controller)

    def setup_engine(self, **settings: Any) -> None:
        pass


class MegatronTokenizer:
    """Their tokenizer's methods over the embedded model's."""

    def __init__(self) -> None:
        self._tokenizer = tokenizer()
        self.vocab_size = len(self._tokenizer)

    @classmethod
    def from_pretrained(cls, **settings: Any) -> MegatronTokenizer:
        return cls()

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids


class _Utils:
    @staticmethod
    def initialize_model_parallel() -> None:
        pass


def install(checkout: Path) -> None:
    """Make the stand-ins importable, in this process alone."""
    stand_for("megatron", "flask", "flask_restful")
    give("megatron.core.inference.sampling_params", SamplingParams=SamplingParams)
    give("megatron.core.tokenizers", MegatronTokenizer=MegatronTokenizer)
    give(HOME, MegatronServer=MegatronServer)
    for module in GENERATORS.values():
        give(module, send_do_generate=lambda: None)
    engines = "tests.unit_tests.inference.engines"
    give(f"{engines}.test_static_engine", StaticInferenceEngineTestHarness=EngineHarness)
    give("tests.unit_tests.test_utilities", Utils=_Utils)
