"""What is too long for the model, or for its cache, in the words that clients look for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.engines import greedy, hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.served import served

MOST = 33
"""A cache of eight blocks, and the token that is never written."""
USER = {"role": "user", "content": "a"}
TOO_LONG: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "a" * 40},
        {"prompt": "abc", "max_tokens": 31},
        {"prompt": ["a", "abc"], "max_tokens": 31},
        {"prompt": "a" * 20, "max_tokens": 14, "n": 2},
        {"prompt": "abc", "max_tokens": 31, "echo": True, "logprobs": 1},
    ],
    "/v1/chat/completions": [
        {"messages": [{**USER, "content": "a" * 40}]},
        {"messages": [USER], "max_tokens": 30},
        {"messages": [USER], "max_completion_tokens": 30},
    ],
    "/v1/responses": [{"input": "a" * 40}, {"input": "a", "max_output_tokens": 30}],
}
WITHOUT_LENGTH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "ignore_eos": True},
    "/v1/responses": {"input": "a", "ignore_eos": True},
}


def engine() -> Any:
    return hash_engine(1, max_requests=2, block_size_tokens=4, block_count=8,
                       tokenizer=hash_tokenizer())  # fmt: skip


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_small_cache_has_no_room_for_is_too_long(path: str, stream: bool) -> None:
    with served(engine()) as made:
        for body in TOO_LONG[path]:
            answer = httpx.post(made.url + path, json={**body, "stream": stream})
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert f"maximum context length is {MOST} tokens" in error["message"], error
            assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", WITHOUT_LENGTH)
def test_a_request_without_a_length_gets_what_fits(path: str) -> None:
    with served(engine()) as made:
        answer = httpx.post(made.url + path, json=WITHOUT_LENGTH[path]).raise_for_status()
        usage = answer.json()["usage"]
    assert usage["total_tokens"] == MOST


def test_without_a_length_an_engine_generates_what_fits() -> None:
    with engine() as made:
        params = greedy(1)
        params.num_tokens_to_generate = None
        (request,) = made.generate([[1, 2, 3]], params)
        assert made.max_request_tokens == MOST
    assert len(request.prompt_tokens) + len(request.generated_tokens) == MOST
