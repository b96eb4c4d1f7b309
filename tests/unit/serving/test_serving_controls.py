"""What is asked of the whole engine over HTTP, and a server without a tokenizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megatron_async.errors import BusyError, MegatronAsyncError
from megatron_async.serving.front_end.no_tokenizer import NoTemplates, NoTokenizer, TokenIds
from tests.support.engines import hash_engine
from tests.support.fake_engine_client import NEVER_STEPS
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import Served, served

KEY = {"authorization": "Bearer key"}


@contextlib.contextmanager
def client_of(server: Served) -> Iterator[httpx.Client]:
    url, patience = server.url, PATIENCE_SECONDS
    with httpx.Client(base_url=url, headers=KEY, timeout=patience) as client:
        yield client


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(hash_engine(1, max_requests=4), api_keys=("key",)) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with client_of(server) as opened:
        yield opened


def test_an_engine_that_was_given_up_is_not_worth_another_try(
    server: Served, client: httpx.Client
) -> None:
    server.client.state = "given up"
    try:
        answers = [client.get("/health"), client.post("/v1/completions", json={"prompt": "a"})]
    finally:
        server.client.state = "ready"
    for answer in answers:
        assert answer.status_code == 503 and "retry-after" not in answer.headers
        assert answer.json()["error"]["code"] == "engine_given_up"


@pytest.mark.parametrize(
    ("query", "body", "more"),
    [
        ("?clear_cache=true&mode=abort", None, ["reset_prefix_cache"]),
        ("", {"clear_cache": True}, ["reset_prefix_cache"]),
        ("?clear_cache=false", None, []),
        ("", {}, []),
    ],
)
def test_a_pause_forgets_cached_prefixes_where_it_is_told_to(
    server: Served, client: httpx.Client, query: str, body: Any, more: list[str]
) -> None:
    server.client.commands.clear()
    client.post(f"/pause{query}", json=body).raise_for_status()
    assert [name for name, _ in server.client.commands] == ["pause", *more]


@pytest.mark.parametrize(
    ("error", "status"), [(BusyError("another one"), 409), (MegatronAsyncError("secret"), 500)]
)
def test_errors_of_controls_have_a_status_of_their_own(
    server: Served, client: httpx.Client, error: Exception, status: int
) -> None:
    server.client.failures = {"weights": error, "profile": error}
    try:
        for path, body in (("/weights", {"path": "x"}), ("/profile", {})):
            answer = client.post(path, json=body)
            assert answer.status_code == status and "secret" not in answer.text
    finally:
        server.client.failures = {}


def test_weights_that_are_not_there_are_the_clients_mistake(client: httpx.Client) -> None:
    answer = client.post("/weights", json={"path": "missing"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "path"


def test_a_client_that_leaves_ends_its_profile(server: Served, client: httpx.Client) -> None:
    body = {"steps": NEVER_STEPS}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/profile", json=body, timeout=httpx.Timeout(PATIENCE_SECONDS, read=0.2))
    server.until(lambda: server.client.cancelled == ["profile"])


# --- without a tokenizer ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    tokenizer: Any = NoTokenizer()
    engine = hash_engine(1, max_requests=4)
    options: Any = {"templates": NoTemplates(), "token_names": TokenIds}
    with served(engine, tokenizer=tokenizer, **options) as running, client_of(running) as client:
        yield client


def test_token_ids_are_answered_with_token_ids(plain: httpx.Client) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 6, "seed": 1, "return_token_ids": True}
    whole = plain.post("/v1/completions", json={**body, "logprobs": 1, "echo": True}).json()
    (choice,) = whole["choices"]
    assert choice["text"] == "" and len(choice["token_ids"]) == 6
    names = [f"token_id:{token}" for token in (1, 2, 3, *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == names
    ids: list[int] = []
    with plain.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (piece,) = json.loads(line.removeprefix("data: "))["choices"]
                assert piece["text"] == ""
                ids += piece["token_ids"]
    assert ids == choice["token_ids"]


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/completions", {"prompt": [1], "stop": "a"}, "stop"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/responses", {"input": "a"}, "input"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "messages"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
def test_texts_need_a_tokenizer(plain: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = plain.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and "tokenizer" in error["message"]


def test_megatrons_api_needs_a_tokenizer(plain: httpx.Client) -> None:
    answer = plain.put("/api", json={"prompts": ["a"]})
    assert answer.status_code == 400 and "tokenizer" in answer.json()["error"]["message"]
