"""``cache_salt`` of requests, and prefixes of each key's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from megatron_async.errors import ConfigError
from megatron_async.serving.http.frontend import ServerConfig
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.served import Served, served

TEXT = "abcdefghij"
KEYS: dict[str, Any] = {"api_keys": ("one", "two"), "admin_api_keys": ("root",)}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
}


@contextmanager
def server(**config: Any) -> Iterator[Served]:
    tokenizer = hash_tokenizer()
    engine = hash_engine(
        1, max_requests=2, block_size_tokens=4, block_count=60, tokenizer=tokenizer
    )
    with served(engine, tokenizer=tokenizer, **config) as made:
        yield made


def cached(server: Served, path: str, key: str = "", **more: Any) -> int:
    """Tokens of the prompt that were found."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(server.url + path, json={**BODIES[path], **more}, headers=headers)
    usage = answer.raise_for_status().json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    assert isinstance(details["cached_tokens"], int)
    return int(details["cached_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_a_request_finds_prefixes_of_its_salt_alone(path: str) -> None:
    with server() as made:
        found = [cached(made, path, cache_salt=salt) for salt in ("a", "b", "a", None, "b", None)]
    assert [count > 0 for count in found] == [False, False, True, False, True, True]


@pytest.mark.parametrize("path", BODIES)
def test_each_key_has_prefixes_of_its_own(path: str) -> None:
    with server(prefix_cache_per_key=True, **KEYS) as made:
        keys = ("one", "two", "one", "root", "two")
        found = [cached(made, path, key) for key in keys]
        assert [count > 0 for count in found] == [False, False, True, False, True]
        salted = [cached(made, path, key, cache_salt="a") for key in ("one", "one", "two")]
        assert [count > 0 for count in salted] == [False, True, False]


def test_megatrons_own_api_has_the_keys_prefixes_too() -> None:
    asked = {"prompts": [TEXT], "tokens_to_generate": 2}
    with server(prefix_cache_per_key=True, **KEYS) as made:
        headers = {"Authorization": "Bearer one"}
        httpx.put(f"{made.url}/api", json=asked, headers=headers).raise_for_status()
        found = [cached(made, "/v1/completions", key) for key in ("two", "one")]
    assert [count > 0 for count in found] == [False, True]


@pytest.mark.parametrize("salt", ["", 7, "a" * 2000])
def test_a_salt_that_is_none_is_refused_by_name(salt: Any) -> None:
    with server() as made:
        asked = {**BODIES["/v1/completions"], "cache_salt": salt}
        answer = httpx.post(f"{made.url}/v1/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_prefixes_of_keys_need_keys() -> None:
    with pytest.raises(ConfigError, match="prefix_cache_per_key needs api_key"):
        ServerConfig(model_names=("tiny",), prefix_cache_per_key=True)
