"""``/v1/responses``: items, calls and events, with the types of the ``openai`` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from megatron_async.errors import EngineDeadError
from megatron_async.serving.chat.answers.message import MessageParser
from megatron_async.serving.chat.answers.tool_calls import ToolCallParser
from megatron_async.serving.endpoints.responses_input import InputMessages
from megatron_async.serving.endpoints.responses_output import OutputItems
from megatron_async.serving.http.errors import ApiError
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import Served, served

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOKENIZER = tiny_tokenizer()
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>'


def checked_response(response: dict[str, Any]) -> dict[str, Any]:
    """``response``, which has the types of the ``openai`` package."""
    OpenAIResponse.model_validate(response)
    return response


def checked_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, numbered through, each under its name and of its type."""
    assert answer.status_code == 200, answer.text
    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items as a client puts them together, from deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append({**event["item"]})
        elif kind == "content_part.added":
            items[-1]["content"] = [event["part"]]
        elif kind == "output_text.delta":
            assert event["item_id"] == items[-1]["id"]
            items[-1]["content"][0]["text"] += event["delta"]
            items[-1]["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            assert event["item_id"] == items[-1]["id"]
            items[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as they are in every answer to the same request."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def both(texts: list[str], body: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The whole answer, and the events of its stream."""
    body = {"input": "hello", **body}
    whole = say(ScriptedClient(TOKENIZER, texts, **options), "/v1/responses", body)
    assert whole.status_code == 200, whole.text
    streamed = ScriptedClient(TOKENIZER, texts, **options)
    events = checked_events(say(streamed, "/v1/responses", {**body, "stream": True}))
    return checked_response(whole.json()), events


# --- calls ----------------------------------------------------------------------------------------


def test_calls_are_items_of_their_own() -> None:
    whole, events = both([f"I ask.{CALL}{CALL} Done."], {"tools": [WEATHER]})
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["message", "function_call", "function_call", "message"]
    text, first, second, rest = whole["output"]
    assert (text["content"][0]["text"], rest["content"][0]["text"]) == ("I ask.", " Done.")
    assert first["call_id"] != second["call_id"] and first["call_id"].startswith("call_")
    for call in (first, second):
        assert call["name"] == "weather" and json.loads(call["arguments"]) == {"town": "Rome"}
    assert whole["status"] == "completed" and whole["parallel_tool_calls"] is True
    assert whole["tools"] == [{**WEATHER, "strict": None}] and whole["tool_choice"] == "auto"
    assert without_ids(items_of(events)) == without_ids(whole["output"])
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
    assert [name for name in names if "arguments.d" in name][-1] == "function_call_arguments.done"
    assert events[-1]["response"]["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]


def test_one_call_alone_where_calls_are_not_parallel() -> None:
    body = {"tools": [WEATHER], "parallel_tool_calls": False}
    whole, events = both([f"I ask.{CALL}{CALL} {CALL} Done."], body, sizes=[1, 3, 90])
    kinds = [item["type"] for item in whole["output"]]
    assert kinds.count("function_call") == 1 and whole["parallel_tool_calls"] is False
    assert without_ids(items_of(events)) == without_ids(whole["output"])


def test_a_call_that_breaks_off_is_incomplete() -> None:
    whole, events = both([CALL[:-20]], {"tools": [WEATHER]}, end="length")
    (call,) = whole["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert without_ids(items_of(events)) == without_ids(whole["output"])


def test_no_text_is_an_empty_message() -> None:
    whole, events = both([""], {})
    (item,) = whole["output"]
    assert item["content"][0]["text"] == "" and item["status"] == "completed"
    assert without_ids(items_of(events)) == without_ids(whole["output"])


pieces = st.sampled_from(["a", " ", "\n", "é", "{", "<tool_call>", CALL, CALL[:-12], CALL[:30]])


@given(
    texts=st.lists(pieces, max_size=5).map("".join),
    sizes=st.lists(st.sampled_from([1, 2, 5, 60, 500]), min_size=1, max_size=4),
    end=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=40, deadline=None)
def test_deltas_add_up_to_the_items(texts: str, sizes: list[int], end: str) -> None:
    ids = TOKENIZER.tokenize(texts)
    status = "completed" if end == "stop" else "incomplete"

    def run(cut: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        items = OutputItems("1", MessageParser(ToolCallParser("hermes", new_id=lambda: "call_1")))
        stream, left, events, turn = TOKENIZER.stream(), ids, [], 0
        while left:
            size = cut[turn % len(cut)]
            turn += 1
            text = "".join(map(stream.push, left[:size]))
            shown = [{"token": token} for token in left[:size]]
            events += items.push(text, shown)
            left = left[size:]
        events += items.push(stream.flush(), [])
        events += items.finish(status)
        return items.items(), events

    items, events = run(sizes)
    assert items_of(events) == items and len({item["id"] for item in items}) >= 1
    (whole, _) = run([10**6])
    assert [_text_of(item) for item in items] == [_text_of(item) for item in whole]
    assert items[-1]["status"] == status


def _text_of(item: dict[str, Any]) -> str:
    return str(item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_log_probs_of_a_message_are_those_of_its_tokens() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = both(["Rome"], asked, sizes=(2, 1))
    shown = whole["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in shown] == list("Rome")
    assert all(len(each["top_logprobs"]) == 2 for each in shown)
    assert items_of(events)[0]["content"][0]["logprobs"] == shown


# --- what is given --------------------------------------------------------------------------------


def test_calls_and_what_they_gave_become_messages_of_the_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    given = InputMessages(
        [
            {"role": "user", "content": "hi"},
            {"type": "message", "role": "assistant", "content": "I ask.", "id": "msg_1"},
            call,
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "rain"}]},
            {**call, "call_id": "c3"},
        ],
        "be short",
    )  # fmt: skip
    roles = [message["role"] for message in given.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    said = given.messages[2]
    assert said["content"] == "I ask."
    assert [one["id"] for one in said["tool_calls"]] == ["c1", "c2"]
    assert given.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    (last,) = given.messages[5]["tool_calls"]
    assert last["function"] == {"name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("messages[0].content", "instructions"),
        ("messages[1].role", "input[0].role"),
        ("messages[2].tool_calls[0].function.arguments", "input[1].arguments"),
        ("messages[3].content[0].text", "input[2].output[0].text"),
        ("messages[2].tool_calls[0].id", "input[1].call_id"),
        ("messages[3].tool_call_id", "input[2].call_id"),
        ("messages", "input"),
    ],
)
def test_errors_name_items_and_not_messages(said: str, place: str) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "a"}
    given = InputMessages([{"role": "user", "content": "a"}, call, output], "be")
    error = given.in_items(ApiError(400, f"{said} is wrong", param=said))
    assert (error.param, str(error)) == (place, f"{place} is wrong")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"metadata": {"a": "\ud83d"}}, "metadata.a"),
    ],
)  # fmt: skip
def test_wrong_items_and_tools_are_refused_by_field(body: Any, param: str) -> None:
    answer = say(ScriptedClient(TOKENIZER, ["a"]), "/v1/responses", {"input": "a", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_forced_calls_are_structured_output() -> None:
    client = ScriptedClient(TOKENIZER, ['[{"name": "weather", "arguments": {"town": "Oslo"}}]'])
    choice = {"type": "function", "name": "weather"}
    body = {"input": "a", "tools": [WEATHER], "tool_choice": choice}
    (call,) = checked_response(say(client, "/v1/responses", body).json())["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"town": "Oslo"})
    schema = json.loads(client.asked[0].params["structured_outputs"]["json"])
    assert schema["maxItems"] == 1


def test_allowed_tools_are_the_only_ones_that_may_be_called() -> None:
    client = ScriptedClient(TOKENIZER, ["[]"])
    other = {**WEATHER, "name": "clock"}
    allowed = {"type": "allowed_tools", "mode": "required",
               "tools": [{"type": "function", "name": "clock"}]}  # fmt: skip
    body = {"input": "a", "tools": [WEATHER, other], "tool_choice": allowed}
    answer = checked_response(say(client, "/v1/responses", body).json())
    assert answer["tool_choice"] == allowed
    asked = json.dumps(client.asked[0].params["structured_outputs"])
    assert "clock" in asked and "weather" not in asked
    wrong = {**allowed, "tools": [{"type": "function", "name": "who"}]}
    refused = say(client, "/v1/responses", {**body, "tool_choice": wrong})
    assert refused.json()["error"]["param"] == "tool_choice"


def test_a_format_is_repeated_with_all_its_fields() -> None:
    format = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    client = ScriptedClient(TOKENIZER, ["12"])
    body = {"input": "a", "text": {"format": format}}
    answer = checked_response(say(client, "/v1/responses", body).json())
    assert answer["text"]["format"] == {**format, "description": None, "strict": True}
    assert json.loads(client.asked[0].params["structured_outputs"]["json"]) == format["schema"]


# --- beginnings and ends --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options: Any = {"max_requests": 8, "block_size_tokens": 4, "block_count": 600}
    with served(hash_engine(1, tokenizer=hash_tokenizer(), **options)) as running:
        yield running


def test_a_stream_begins_before_there_is_a_token(server: Served) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "stream": True, "ignore_eos": True}
    server.client.engine.suspend()
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/responses", json=body, timeout=PATIENCE_SECONDS
        ) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            begun = [json.loads(next(lines)[6:]) for _ in range(2)]
            names = [event["type"] for event in begun]
            assert names == ["response.created", "response.in_progress"]
            assert begun[0]["response"]["status"] == "in_progress"
            server.client.engine.resume()
            last = json.loads(list(lines)[-1][6:])
        assert last["type"] == "response.incomplete"
    finally:
        server.client.engine.resume()


def test_a_full_queue_is_still_a_status_of_a_stream(server: Served) -> None:
    server.client.most = 0
    try:
        body = {"input": "hello", "stream": True}
        assert httpx.post(f"{server.url}/v1/responses", json=body).status_code == 429
    finally:
        server.client.most = None


def test_a_stream_cut_by_an_error_ends_with_a_response_that_failed() -> None:
    died = EngineDeadError("the engine has died; try again later")
    client = ScriptedClient(TOKENIZER, ["He"], end=died)
    events = checked_events(say(client, "/v1/responses", {"input": "a", "stream": True}))
    assert [event["type"] for event in events][-2:] == [
        "response.output_text.delta",
        "response.failed",
    ]
    response = checked_response(events[-1]["response"])
    assert response["status"] == "failed" and "died" in response["error"]["message"]
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["content"][0]["text"] == "He"
    assert say(client, "/v1/responses", {"input": "a"}).status_code == 503


def test_a_response_that_ran_out_of_time_is_incomplete() -> None:
    whole, events = both(["He"], {}, end="timeout")
    details = {"reason": "max_output_tokens", "stop_reason": "timeout"}
    assert whole["incomplete_details"] == details
    assert events[-1]["response"]["incomplete_details"] == details
