"""Large bodies are read in a thread, with the answers of small ones."""

from __future__ import annotations

import gc
import json
import threading
from typing import Any

import httpx
import pytest

from megatron_async.errors import RequestError
from megatron_async.request import parameter_checks as checks
from megatron_async.serving.bodies.sampling_fields import SamplingFields
from megatron_async.serving.endpoints import request_shapes
from megatron_async.serving.endpoints.json_body import LARGE
from megatron_async.serving.front_end import generation
from megatron_async.serving.http import http_server
from tests.support.http_api import ENDPOINTS, completion, error_of, ids_of

PADDING = {"user": "x" * LARGE}
"""A field that changes nothing."""
MILLION = 1_000_000
THREAD = "large bodies"


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The threads that call a function from now on."""
    called, found = getattr(owner, name), []

    def calls(*given: Any, **named: Any) -> Any:
        found.append(threading.current_thread().name)
        return called(*given, **named)

    monkeypatch.setattr(owner, name, calls)
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_a_million_token_ids_are_checked_outside_of_the_event_loop(
    nested: bool, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, request_shapes, "check_tokens")
    tokens: Any = [300] * MILLION
    body = {"prompt": [tokens[:1000]] * 900 if nested else tokens}
    error_of(client.post("/v1/completions", json=body), 400)
    assert threads and all(name.startswith(THREAD) for name in threads)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("large", [False, True])
def test_parameters_of_a_large_body_are_checked_outside_of_the_event_loop(
    large: bool, path: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, SamplingFields, "params")
    body = {**ENDPOINTS[path], **(PADDING if large else {})}
    assert client.post(path, json=body).status_code == 200
    assert [name.startswith(THREAD) for name in threads] == [large]


WRONG: dict[str, dict[str, Any]] = {
    "a type": {"prompt": "a", "max_tokens": "many"},
    "an item": {"prompt": [1, 2, None]},
    "nothing": {},
    "a foreign field": {"prompt": "a", "regex": "b"},
    "a parameter": {"prompt": "a", "n": 0},
    "a list": {"prompt": "a", "stop_token_ids": [1, -1]},
    "depth": {"prompt": "a", "guided_json": json.loads('{"a":' * 70 + "1" + "}" * 70)},
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_large_bodies_are_those_of_small_ones(name: str, client: httpx.Client) -> None:
    body = WRONG[name]
    small, large = (client.post("/v1/completions", json={**body, **more}) for more in ({}, PADDING))
    assert small.status_code == large.status_code >= 400
    assert small.json() == large.json()


@pytest.mark.parametrize("body", [b"{", b"nonsense", b"[1]"])
def test_what_is_no_object_is_told_so_in_a_large_body_too(
    body: bytes, client: httpx.Client
) -> None:
    headers = {"content-type": "application/json"}
    answers = [
        client.post("/v1/completions", content=body + b" " * more, headers=headers)
        for more in (0, LARGE)
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    first, second = (answer.json()["error"] for answer in answers)
    assert (first["code"], first["type"]) == (second["code"], second["type"])


def test_a_large_body_is_served(client: httpx.Client) -> None:
    assert completion(client, **PADDING)["choices"] == completion(client)["choices"]
    ids = {"prompt": ids_of("abc")}
    assert completion(client, **ids, **PADDING)["choices"] == completion(client)["choices"]


def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_looked_at(
    client: httpx.Client,
) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": [2**30] * 50_000}), 400)
    assert error["code"] == "context_length_exceeded"
    error = error_of(client.post("/v1/completions", json={"prompt": [1, 2**30]}), 400)
    assert "token id 1073741824" in error["message"]


def test_parameters_that_each_prompt_brings_are_bounded_together(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(60))
    body: dict[str, Any] = {"allowed_token_ids": ids, "max_tokens": 1, "prompt": ["a"] * 4}
    monkeypatch.setattr(generation, "MOST_COPIED", 500)
    error = error_of(client.post("/v1/completions", json=body), 413)
    assert error["code"] == "too_many_values" and error["param"] == "prompt"
    assert "500 bytes are the most" in error["message"]
    assert completion(client, **{**body, "prompt": ["a"]})
    assert completion(client, **{**body, "allowed_token_ids": [5]})


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize(("count", "said"), [(524_289, "at most 524,288"), (200, "has 200 token")])
def test_more_token_ids_than_a_model_has_are_refused_unread(
    name: str, count: int, said: str, client: httpx.Client
) -> None:
    asked = {"prompt": "a", name: list(range(count))}
    error = error_of(client.post("/v1/completions", json=asked), 400)
    assert error["param"] == name and said in error["message"]


def test_the_collector_looks_at_nothing_that_a_front_end_has_for_good() -> None:
    async def frozen() -> int:
        return gc.get_freeze_count()

    try:
        assert http_server.run(frozen()) > 10_000
    finally:
        gc.unfreeze()


# --- lists of many ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[3, 1, 3], (5,), range(4), {7}, []])
def test_token_ids_are_each_there_once(ids: Any) -> None:
    assert checks.token_ids("ids", ids) == tuple(dict.fromkeys(ids))


@pytest.mark.parametrize("ids", [[1, True], [1, "2"], [-1, 1], [2**31, 1], [1.0], [None]])
def test_a_wrong_token_id_is_named(ids: Any) -> None:
    with pytest.raises(RequestError, match="ids has"):
        checks.token_ids("ids", ids)


@pytest.mark.parametrize(("ids", "wrong"), [([1, 9, -1], 9), ([-3, 1], -3), ({8: 0.5}, 8)])
def test_the_first_id_that_a_vocabulary_has_not_is_named(ids: Any, wrong: int) -> None:
    with pytest.raises(RequestError, match=f"token id {wrong};"):
        checks.check_vocabulary("ids", ids, 8)
    for fits in ([], [0, 7], {3: 1.0}, range(8)):
        checks.check_vocabulary("ids", fits, 8)


def test_biases_are_counted_before_they_are_looked_at() -> None:
    biases = {str(token): None for token in range(5)}
    with pytest.raises(RequestError, match="has 5 tokens; the most is 4"):
        checks.logit_bias(100.0, 4)("logit_bias", biases)
