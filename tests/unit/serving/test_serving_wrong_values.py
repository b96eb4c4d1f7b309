"""Wrong values over HTTP are the client's, and are named by their field."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.bodies.foreign_fields import FOREIGN_FIELDS
from megatron_async.serving.bodies.python_fields import (
    DEFAULTS,
    HARMLESS,
    MEGATRON,
    OPENAI,
    SGLANG,
)
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.endpoints.engine_api import DetokenizeRequest, TokenizeRequest
from megatron_async.serving.endpoints.megatron_api import MegatronRequest
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from megatron_async.serving.endpoints.responses_api import ResponsesRequest
from tests.support.http_api import ENDPOINTS, MESSAGES, TOOL, USER, completion, error_of, post
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

# --- wrong values ---------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, [1, "a"], [], [[]], [999], [-1], "", "a" * 300, ["a"] * 2000, "\ud800"),
    "temperature": ("x", -1, 1e9, "NaN", 10**400),
    "top_p": (-0.1, 1.1, "1"),
    "top_k": (-2, 1.5),
    "min_p": (2,),
    "n": (0, -1, 1000, "2", True),
    "best_of": (0, 1000),
    "seed": ("s", 2**70),
    "stop": (3, [1], [""], {}),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "logit_bias": ([], {"a": 1}, {"999": 1}, {"1": "x"}, {str(i): 1 for i in range(2000)}),
    "max_tokens": (-1, 0, 1000, 1.5),
    "min_tokens": (-1, 100),
    "num_speculative_tokens": (-1, 3, "x"),
    "stop_token_ids": ([-1], [999], 5),
    "allowed_token_ids": ([], [999]),
    "bad_words": ([""], "x"),
    "logprobs": (-1, 21, True),
    "prompt_logprobs": (-1, 21),
    "priority": ("high", 10**9),
    "guided_json": ("{", {"type": "nothing"}, 5),
    "guided_regex": ("((",),
    "guided_grammar": ("root ::= nothing",),
    "guided_choice": ([], "a"),
    "structured_outputs": ({}, {"json": "{}", "regex": "a"}, {"who": 1}),
    "stream": ("yes",),
    "suffix": ("x",),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_field(client: httpx.Client, name: str) -> None:
    for value in WRONG[name]:
        content = json.dumps({"prompt": "a", "max_tokens": 4, name: value})
        for stream in ("", ', "stream": true'):
            if name == "stream" and stream:
                continue
            answer = client.post(
                "/v1/completions",
                content=f"{content[:-1]}{stream}}}".replace('"NaN"', "NaN"),
                headers={"content-type": "application/json"},
            )
            error = error_of(answer, 400)
            assert error["param"].split(".")[0].split("[")[0] == name, (value, error)
            assert error["type"] == "invalid_request_error"


CHAT_WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "u", "content": "a" * 400}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     "response_format"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    pytest.importorskip("megatron_async.serving.chat.answers.tool_calls")
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    assert error_of(client.post("/v1/chat/completions", json=asked), 400)["param"] == param


@pytest.mark.parametrize(("body", "param"), CHAT_WRONG)
def test_wrong_chats_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    assert error_of(client.post("/v1/chat/completions", json=asked), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "max_tokens": 3}, "max_tokens"),
        ({"input": "a", "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a" * 400}, "input"),
    ],
)
def test_wrong_responses_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    assert error_of(client.post("/v1/responses", json=body), 400)["param"] == param


ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 3.5, 10**30, -(2**63), float("nan"), float("inf"), 60, 256),
    *("", "a", "\ud800", "\0", "auto", "[a-c]", 'root ::= "a"', '{"type": "integer"}'),
    *([], [1], ["a"], [[1]], [[]], [None], ["a", "b"], [{"role": "user", "content": "a"}]),
    *({}, {"a": 1}, {"1": 1}, {"type": "json_object"}, {"include_usage": True}, {"regex": "a"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "maxLength": 2}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}},
    {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}},
)
SENT: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 2}),
    "/api": (MegatronRequest, {"prompts": ["a"], "tokens_to_generate": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


@pytest.mark.parametrize("path", SENT)
def test_no_value_is_an_internal_error(client: httpx.Client, path: str) -> None:
    model, body = SENT[path]
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    chance, statuses = random.Random(path), set()
    for _ in range(120):
        name = chance.choice([name for name in names if name not in ("tools", "tool_choice")])
        sent = {**body, name: chance.choice(ODD)}
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=json.dumps(sent), headers=headers)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (sent, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert '"error":{' not in answer.text
    assert {200, 400} <= statuses


@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_of_other_servers_that_change_the_answer_are_refused(
    client: httpx.Client, path: str
) -> None:
    """Unless they say nothing."""
    own = {
        "/v1/completions": {"echo", "best_of", "suffix"},
        "/v1/chat/completions": {"thinking_token_budget"},
    }.get(path, set())
    for name, instead in FOREIGN_FIELDS.items():
        if name in own:
            continue
        for value in (True, "some", [1], {"a": 1}, 7):
            error = error_of(client.post(path, json={**ENDPOINTS[path], name: value}), 400)
            assert error["param"] == name and instead in error["message"], (name, value)
    for value in (None, False, "", [], {}):
        names = FOREIGN_FIELDS.keys() - own
        post(client, path, **ENDPOINTS[path], **dict.fromkeys(names, value))
    neutral = {"length_penalty": 1.0, "mirostat": 0, "function_call": "auto"}
    post(client, path, **ENDPOINTS[path], **neutral, who_knows=[1], service_tier="flex", user="me")


PYTHONS: dict[str, tuple[Any, ...]] = {
    "forced_token_ids": ([5, 6], [999], "a"),
    "prompt_hidden_states": ([0, -1],),
    "return_log_probs": (True,),
    "top_n_logprobs": (3,),
    "log_probs_mode": ("processed",),
    "num_tokens_to_generate": (4, 30),
    "num_tokens_total": (9,),
    "termination_id": (-1, 0, 7),
    "stop_words": ("a", ["a"]),
    "return_segments": (True,),
    "detokenize_stop_sequence": (True,),
    "return_prompt_tokens": (True,),
    "return_prompt_top_n_logprobs": (True,),
    "streaming": (True,),
    "do_kv_handoff": (True,),
}
"""Fields of SamplingParams that no path over HTTP has by these names."""
PATHS = {**ENDPOINTS, "/generate": {"text": "a"}, "/api": {"prompts": ["a"]}}


def asked(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return client.request("PUT" if path == "/api" else "POST", path, json=body)


@pytest.mark.parametrize("path", PATHS)
def test_sampling_parameters_of_python_are_never_dropped(client: httpx.Client, path: str) -> None:
    """Those that a path has by another name, or not at all; values that ask for nothing pass."""
    bodies: list[tuple[str, Callable[..., dict[str, Any]]]]
    bodies = [("", lambda **fields: {**PATHS[path], **fields})]
    if path == "/generate":
        inside = "sampling_params."
        bodies.append((inside, lambda **fields: {**PATHS[path], "sampling_params": fields}))
    for place, body in bodies:
        for name, values in PYTHONS.items():
            if path == "/api" and name in MegatronRequest.model_fields:
                continue
            if path == "/generate" and name == "log_probs_mode":
                values = ("raw",)  # of what was sampled from they are anyway
            for value in values:
                error = error_of(asked(client, path, body(**{name: value})), 400)
                assert (error["param"], error["code"]) == (place + name, "unsupported_parameter")
                assert f"{place}{name} is not supported here; " in error["message"]
        nothing = {**dict.fromkeys(PYTHONS), "return_log_probs": False, "top_n_logprobs": 0}
        nothing |= {"stop_words": [], "streaming": False, "detokenize": False}
        nothing |= {"forced_token_ids": [], "do_kv_handoff": False}
        if not place:  # where all that is unknown and not empty is refused
            nothing["streaming_interval"] = 4
            nothing["skip_prompt_log_probs"] = path != "/api"
            nothing["log_probs_mode"] = "processed" if path == "/generate" else "raw"
        answer = asked(client, path, body(**nothing))
        assert answer.status_code == 200, answer.text


def test_what_python_calls_otherwise_is_named(client: httpx.Client) -> None:
    for path, field, wrong, instead in (
        (
            "/v1/completions",
            "forced_token_ids",
            [5],
            "as the end of the prompt's token ids, with p",
        ),
        ("/v1/completions", "skip_prompt_log_probs", False, "send prompt_logprobs"),
        ("/v1/completions", "add_BOS", True, "send add_special_tokens"),
        ("/v1/chat/completions", "num_tokens_to_generate", 3, "send max_tokens"),
        ("/api", "seed", 3, "send random_seed"),
        ("/api", "skip_prompt_log_probs", True, "leave it out"),
        ("/api", "forced_token_ids", [5], "leave it out"),
        ("/generate", "temperature", 0.5, "sampling parameters go into sampling_params"),
        ("/generate", "forced_token_ids", [5], "sampling parameters go into sampling_params"),
    ):
        error = error_of(asked(client, path, {**PATHS[path], field: wrong}), 400)
        assert error["param"] == field and instead in error["message"], (path, field)
    for field, wrong, instead in (
        ("seed", 0, "send sampling_seed"),
        ("forced_token_ids", [5], "send them at the end of input_ids, with logprob_start_len"),
        ("top_n_logprobs", 2, "send top_logprobs_num beside sampling_params"),
    ):
        body = {"text": "a", "sampling_params": {field: wrong}}
        error = error_of(client.post("/generate", json=body), 400)
        assert error["param"] == f"sampling_params.{field}" and instead in error["message"]


def test_each_sampling_parameter_is_a_field_or_is_refused() -> None:
    """One that is added to SamplingParams without a thought of HTTP is refused there."""
    ours = set(inspect.signature(SamplingParams).parameters)
    assert DEFAULTS.keys() | HARMLESS == ours and not DEFAULTS.keys() & HARMLESS
    assert {*OPENAI, *SGLANG, *MEGATRON} <= ours
    over_http = set(CompletionRequest.model_fields) | FOREIGN_FIELDS.keys()
    assert ours - over_http - HARMLESS - {"skip_prompt_log_probs", "add_BOS"} == PYTHONS.keys()


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
@pytest.mark.parametrize(
    "name", ("logprob_token_ids", "return_token_offsets", "watermarking", "vllm_xargs")
)
def test_fields_of_newer_releases_of_vllm_are_refused_by_name(
    client: httpx.Client, path: str, name: str
) -> None:
    error = error_of(client.post(path, json={**ENDPOINTS[path], name: [50]}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
def test_token_ids_in_the_place_of_a_prompt_are_refused_by_name(
    client: httpx.Client, path: str
) -> None:
    given = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    error = error_of(client.post(path, json={**ENDPOINTS[path], **given}), 400)
    assert error["param"] == "kv_transfer_params" and "token ids as prompt" in error["message"]


def test_too_long_prompts_have_openais_code(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "a" * 256}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 300}, "prompt"),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 254}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a", "abc"], "max_tokens": 255}, "max_tokens"),
        ("/v1/completions", {"prompt": "a" * 25_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 250},
            "max_completion_tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 256}], "max_tokens": 1},
            "messages",
        ),
        ("/v1/responses", {"input": "a" * 256}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 256}, "max_output_tokens"),
    ],
)
def test_too_long_requests_are_told_in_the_words_that_clients_look_for(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(client.post(path, json=body), 400)
    assert "maximum context length is 256 tokens" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_what_is_no_json_object_is_refused(client: httpx.Client) -> None:
    plain = {"content-type": "text/plain"}
    for content, headers in (
        ("{", None),
        ("[1]", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"prompt": "a"}', plain),
        (b"\xff\xfe", None),
    ):
        headers = headers or {"content-type": "application/json"}
        error_of(client.post("/v1/completions", content=content, headers=headers), 400)


def test_unknown_models_and_paths_are_not_found(client: httpx.Client) -> None:
    body = {"prompt": "a", "model": "other"}
    assert error_of(client.post("/v1/completions", json=body), 404)["code"] == "model_not_found"
    assert error_of(client.get("/v1/models/other"), 404)["param"] == "model"
    error_of(client.get("/nowhere"), 404)
    error_of(client.get("/v1/completions"), 405)
    for method, path, allowed in (
        ("GET", "/api", "POST, PUT"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path
    assert completion(client, model="small")["model"] == "small"


def test_parameters_that_leave_no_token_are_the_clients() -> None:
    body = {"prompt": "a", "guided_choice": ["a"], "allowed_token_ids": [1]}
    client = ScriptedClient(tiny_tokenizer(), ["H"], end="error")
    error = error_of(say(client, "/v1/completions", body), 400)
    assert (error["param"], error["code"]) == ("guided_choice", "nothing_allowed")
    assert error_of(say(client, "/v1/completions", {"prompt": "a"}), 500)["code"] == "nan"


def test_whole_floats_are_integers(client: httpx.Client) -> None:
    assert completion(client, max_tokens=3.0, ignore_eos=True)["usage"]["completion_tokens"] == 3
    for wrong in (3.5, float("1e999"), "3"):
        content = json.dumps({"prompt": "a", "max_tokens": wrong})
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert error_of(answer, 400)["param"] == "max_tokens"


# --- what must not take everybody's time ----------------------------------------------------------


def test_long_texts_are_refused_before_they_are_looked_at(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 2_000_000}),
        ("/tokenize", {"prompt": "x" * 2_000_000}),
        ("/v1/completions", {"prompt": "ab", "stop": "x" * 100_000}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("prompt", "stop"), answer.text


def test_a_lone_surrogate_is_the_clients_mistake(client: httpx.Client) -> None:
    lone = '"\\ud83d"'
    headers = {"content-type": "application/json"}
    for name, value in (
        ("stop", lone),
        ("bad_words", f"[{lone}]"),
        ("prompt", lone),
        ("guided_choice", f"[{lone}]"),
        ("guided_regex", lone),
        ("guided_json", f'{{"const": {lone}}}'),
    ):
        content = f'{{"prompt": "ab", "{name}": {value}}}'
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert str(error_of(answer, 400)["param"]).split(".")[0].split("[")[0] == name, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", "\ud83d"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"\ud83d": "1"}},
         "structured_outputs"),
        ("/v1/chat/completions", {"messages": [USER, USER | {"content": "\ud83d"}]},
         "messages[1].content"),
        ("/v1/chat/completions", {"messages": [USER], "tools": [
            {"type": "function", "function": {"name": "f", "description": "\ud83d"}}]},
         "tools[0].function.description"),
        ("/v1/responses", {"input": "\ud83d"}, "input"),
        ("/v1/responses", {"input": "a", "instructions": "\ud83d"}, "instructions"),
        ("/v1/responses", {"input": [USER | {"content": [
            {"type": "input_text", "text": "\ud83d"}]}]}, "input[0].content[0].text"),
        ("/v1/responses", {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "\ud83d", "schema": {}}}}, "text.format.name"),
        ("/tokenize", {"messages": [USER | {"content": "\ud83d"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/api", {"prompts": ["\ud83d"]}, "prompts"),
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_named_by_its_field(path: str, body: Any, param: str) -> None:
    templates = ChatTemplates.from_directory("tiny")
    asked = ScriptedClient(tiny_tokenizer(), ["a"] * 2)
    answer = say(asked, path, body, templates)
    assert error_of(answer, 400)["param"] == param
