"""The server around its requests: keys, queues, logs, and clients that go away."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megatron_async.errors import ConfigError
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.http.logs import JsonFormatter
from tests.support.http_api import KEYS, completion, engine, error_of, events_of, http, ids_of, post
from tests.support.served import Served, served


def test_models_tokens_health_and_version(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "small"]
    assert client.get("/v1/models/small").json()["max_model_len"] == 256
    tokens = post(client, "/tokenize", prompt="abc", return_token_strs=True)
    assert tokens["tokens"] == ids_of("abc") and tokens["token_strs"] == ["a", "b", "c"]
    assert post(client, "/tokenize", prompt="abc")["token_strs"] is None
    assert post(client, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "abc"}
    talk = post(client, "/tokenize", messages=[{"role": "user", "content": "a"}])
    assert talk["count"] == len(ids_of("user:a,a:"))
    error_of(client.post("/tokenize", json={}), 400)
    error_of(client.post("/detokenize", json={"tokens": [10**6]}), 400)
    for path in ("/health", "/v1/health", "/version", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.get("/docs").status_code == 404


@pytest.mark.parametrize("text", ["<end>", "a<end>b<end>", "ab"])
def test_tokens_are_the_text_again_with_its_special_tokens(client: httpx.Client, text: str) -> None:
    tokens = post(client, "/tokenize", prompt=text)["tokens"]
    assert post(client, "/detokenize", tokens=tokens) == {"prompt": text}
    shown = post(client, "/detokenize", tokens=tokens, skip_special_tokens=True)
    assert shown == {"prompt": text.replace("<end>", "")}


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_megatrons_paths_without_a_version_are_those_with_one(
    server: Served, client: httpx.Client, path: str
) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "seed": 1}
    body |= {"max_tokens": 4}
    answers = [client.post(each, json=body).json()["choices"] for each in (path, f"/v1{path}")]
    assert answers[0] == answers[1]
    assert client.put(path, json=body).status_code == 405


def test_request_ids_are_echoed(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-own"}
    )
    assert answer.headers["x-request-id"] == "my-own" and answer.json()["id"] == "cmpl-my-own"
    for odd in ("", "a b", "x" * 200):
        made = client.get("/nowhere", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made != odd and len(made) == 32


def test_logs_are_json_without_prompts(
    server: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> set[str]:
        fields = (vars(record).get("fields", {}) for record in caplog.records)
        return {each["request_id"] for each in fields if "status" in each}

    with caplog.at_level(logging.INFO, "megatron_async.serving"):
        headers = {"x-request-id": "logged"}
        body = {"prompt": "abcabc", "seed": 1}
        text = client.post("/v1/completions", json=body, headers=headers).json()["choices"][0]
        headers = {"x-request-id": "logged-too"}
        client.post("/v1/completions", json={"prompt": "zyxzyx", "n": 0}, headers=headers)
        body = {"prompt": "a", "request_id": "in-the-body"}
        assert client.post("/v1/completions", json=body).json()["id"] == "cmpl-in-the-body"
        server.until(lambda: {"logged", "logged-too", "in-the-body"} <= logged())
    lines = [JsonFormatter().format(record) for record in caplog.records]
    said = next(line for line in map(json.loads, lines) if line.get("request_id") == "logged")
    assert (said["path"], said["status"]) == ("/v1/completions", 200)
    assert said["prompt_tokens"] == 6 and said["seconds"] >= 0
    assert 0 < said["completion_tokens"] <= 16
    for secret in ("abcabc", "zyxzyx", text["text"]):
        assert not any(secret in line for line in lines)


def test_metrics_are_told_what_happens(server: Served, client: httpx.Client) -> None:
    noted = server.metrics.noted

    def is_idle() -> bool:
        names = [name for name, _ in noted]
        return names.count("opened") == names.count("closed")

    server.until(is_idle)  # an answer arrives before its request is counted as over
    noted.clear()
    (choice,) = completion(client, max_tokens=4, ignore_eos=True)["choices"]
    server.until(lambda: noted[-1][0] == "closed")
    assert [name for name, _ in noted] == [
        *("opened", "first_token", "tokens", "tokens", "tokens", "finished", "closed")
    ]
    count, seconds = noted[2][1]
    reason, usage, total = noted[-2][1]
    assert (count, reason, usage["generated_tokens"]) == (1, choice["finish_reason"], 4)
    assert 0 <= seconds <= total and 0 <= noted[1][1] <= total
    noted.clear()
    for body in ({"prompt": "a", "stop_token_ids": [999]}, {"prompt": 1}):
        client.post("/v1/completions", json=body)
    client.get("/nowhere")
    server.until(lambda: len(noted) >= 6)
    assert noted == [("opened", None), ("closed", None), ("refused", 400)] * 2


def test_an_unexpected_error_is_a_500_that_says_nothing(
    server: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(server.front.generator, "tokenize", broken)
    answer = client.post("/v1/completions", json={"prompt": "a"})
    error = error_of(answer, 500)
    assert "secret" not in error["message"] and error["type"] == "server_error"
    assert answer.headers["x-request-id"]
    assert any(record.exc_info for record in caplog.records)  # before the answer is sent


def test_only_known_keys_get_in() -> None:
    with served(engine(), api_keys=KEYS) as server, http(server) as client:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": KEYS[0]},
                        {"authorization": "Bearer \xe9".encode("latin-1")}):  # fmt: skip
            answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            error_of(client.post("/pause", headers=headers), 401)
        for path in ("/health", "/v1/health", "/version", "/metrics"):
            assert client.get(path).status_code == 200
        for key in KEYS:
            client.headers["authorization"] = f"Bearer {key}"
            assert completion(client)["choices"]


def test_controls_reach_the_engine_behind_a_key() -> None:
    with served(engine(), api_keys=KEYS) as server, http(server) as client:
        client.headers["authorization"] = f"Bearer {KEYS[1]}"
        assert post(client, "/pause", mode="wait", timeout=2.5) == {"done": "pause"}
        assert client.post("/pause").json() == {"done": "pause"}
        for name in ("resume", "suspend", "reset_prefix_cache"):
            assert client.post(f"/{name}").json() == {"done": name}
        assert client.post("/weights", json={"path": "somewhere"}).json() == {"done": "weights"}
        assert error_of(client.post("/weights", json={"path": "missing"}), 400)["message"]
        trace = client.post("/profile", json={"steps": 5})
        assert trace.json() == {"traceEvents": []}
        assert "trace.json" in trace.headers["content-disposition"]
        error_of(client.post("/pause", json={"mode": "now"}), 400)
        error_of(client.post("/profile", json={"steps": 0}), 400)
        asked = server.client.commands
    assert asked[0] == ("pause", {"mode": "wait", "timeout": 2.5})
    assert [name for name, _ in asked] == [
        *("pause", "pause", "resume", "suspend", "reset_prefix_cache"),
        *("weights", "weights", "profile"),
    ]


def test_without_keys_nobody_controls_the_engine(server: Served, client: httpx.Client) -> None:
    for name in ("pause", "resume", "suspend", "weights", "reset_prefix_cache", "profile"):
        error = error_of(client.post(f"/{name}", json={"path": "x"}), 403)
        assert "--api-key" in error["message"]
    assert server.client.commands == []


def test_large_bodies_are_refused_before_they_are_read() -> None:
    with served(engine(), max_body_bytes=1000) as server, http(server) as client:
        answer = client.post("/v1/completions", content=b"x" * 8_000_000)
        assert error_of(answer, 413)["message"]

        def endless() -> Iterator[bytes]:
            while True:
                yield b'{"prompt": ' + b" " * 4096

        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=endless(), headers=headers)
        error_of(answer, 413)
        assert completion(client)["choices"]


def test_pages_from_elsewhere_may_call_only_if_allowed(client: httpx.Client) -> None:
    headers = {"origin": "https://other", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.get("/version", headers=headers).headers
    allowed: dict[str, Any] = {"allow_origins": ("https://other",), "api_keys": KEYS}
    with served(engine(), **allowed) as server, http(server) as other:
        answer = other.options("/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://other"


def test_a_full_queue_is_429_with_retry_after(server: Served, client: httpx.Client) -> None:
    server.client.most = 0
    try:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            answer = client.post("/v1/completions", json=body)
            assert error_of(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    finally:
        server.client.most = None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "n": 7}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 7, "stream": True}, "n"),
        ("/v1/completions", {"prompt": "a", "best_of": 7}, "best_of"),
        ("/v1/completions", {"prompt": ["a"] * 4, "n": 2}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 7}, "n"),
        ("/api", {"prompts": ["a"] * 7}, "prompts"),
    ],
)
def test_what_can_never_fit_is_no_full_queue(
    server: Served, client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    server.client.max_sequences = 6
    try:
        assert error_of(client.post(path, json=body), 400)["param"] == param
        assert len(completion(client, n=6, max_tokens=1)["choices"]) == 6
    finally:
        server.client.max_sequences = None


def test_head_is_allowed_where_get_is(server: Served, client: httpx.Client) -> None:
    for path in ("/health", "/v1/health", "/version", "/metrics", "/v1/models", "/v1/models/tiny"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert client.head("/v1/models/other").status_code == 404
    assert client.head("/v1/completions").status_code == 405
    assert client.head("/").status_code == 200
    assert client.head("/live").status_code == 405  # its events have no end
    server.client.state = "dead"
    try:
        assert client.head("/health").status_code == 503
    finally:
        server.client.state = "ready"


def test_503_while_the_engine_is_not_there(server: Served, client: httpx.Client) -> None:
    server.client.state = "dead"
    try:
        for path in ("/health", "/v1/health"):
            answer = client.get(path)
            assert error_of(answer, 503)["type"] == "server_error"
            assert answer.headers["retry-after"]
        for stream in (False, True):
            error_of(client.post("/v1/completions", json={"prompt": "a", "stream": stream}), 503)
        assert client.get("/version").status_code == 200
        assert client.get("/v1/models").status_code == 200
    finally:
        server.client.state = "ready"
    assert client.get("/health").status_code == 200


def test_an_engine_that_dies_ends_streams_with_an_error() -> None:
    with served(engine()) as server, http(server) as client:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert "choices" in next(lines)
            server.client.kill()
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_not_ready"


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_a_request_with_its_text(stream: bool) -> None:
    slow = engine(0)
    with served(slow, request_timeout=0.05) as server, http(server) as client:
        slow.suspend()
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        if stream:
            choice = events_of(client, "/v1/completions", **body)[-1]["choices"][0]
        else:
            choice = post(client, "/v1/completions", **body)["choices"][0]
    # OpenAI's API has no word for it, and clients with types take no others.
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    with served(one) as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}
        with http(server) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
                    one.suspend()  # it does not end by itself
            else:
                one.suspend()
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.2)
        server.until(lambda: len(server.client.aborted) == 1)
        assert server.call(lambda: (server.client.running, server.front.generator.running)) == (
            {},
            set(),
        )
        one.resume()
        with http(server) as client:
            assert completion(client)["choices"]
        server.until(lambda: not one.loop.has_work)
    one.scheduler.check_idle()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_draining_refuses_new_requests_and_ends_the_others() -> None:
    one = engine()
    with served(one) as server, http(server) as client:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            one.suspend()
            server.front.generator.draining = True
            with http(server) as other:
                error_of(other.post("/v1/completions", json=body), 503)
                error_of(other.get("/health"), 503)
            server.spawn(server.front.generator.abort_all())
            *_, last, done = lines
        assert done == "data: [DONE]"
        choice = json.loads(last.removeprefix("data: "))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "abort")


@pytest.mark.parametrize(
    "values",
    [
        {"model_names": ()},
        {"api_keys": ("",)},
        {"api_keys": ("é",)},
        {"max_body_bytes": 0},
        {"request_timeout": 0.0},
        {"shutdown_timeout": -1.0},
    ],
)
def test_wrong_configurations_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**{"model_names": ("tiny",), **values})
