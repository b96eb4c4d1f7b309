"""Requests over HTTP to a server over an engine of hashes in the same process."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import Served

KEYS = ("first-key", "second-key")
TOKENIZER = hash_tokenizer()
END = TOKENIZER.eod


def engine(depth: int = 1, **values: Any) -> Any:
    values = {"max_requests": 8, "block_size_tokens": 4, "block_count": 600, **values}
    return hash_engine(depth, tokenizer=TOKENIZER, **values)


def http(server: Served, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, **options)


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """The JSON of each event of a stream, which ends as it should."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    if path != "/v1/responses":
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def completion(client: httpx.Client, **body: Any) -> Any:
    return post(client, "/v1/completions", **{"prompt": "abc", "seed": 3, "max_tokens": 12, **body})


def chat(client: httpx.Client, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "seed": 3, "max_completion_tokens": 12, **body}
    return post(client, "/v1/chat/completions", **asked)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.tokenize(text)


USER: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}
