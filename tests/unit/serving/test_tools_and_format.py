"""``tools`` beside ``response_format``: the format is that of a message, and calls go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import PlainTemplates

TOKENIZER = tiny_tokenizer()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "own", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": FORMAT,
}
RESPONSES: dict[str, Any] = {
    "input": "a",
    "tools": [{"type": "function", **FUNCTION}],
    "text": {"format": {"type": "json_schema", "name": "own", "schema": SCHEMA}},
}
NAMED = {"/v1/chat/completions": {"type": "function", "function": {"name": "weather"}},
         "/v1/responses": {"type": "function", "name": "weather"}}  # fmt: skip
PATHS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>'
LLAMA = PlainTemplates('<|python_tag|> "parameters"')


def asked_by(
    path: str, text: str, templates: Any = None, **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The structured output that the engine is asked for, and the answer."""
    client = ScriptedClient(TOKENIZER, [text])
    answer = say(client, path, {**PATHS[path], **more}, templates)
    assert answer.status_code == 200, answer.text
    return client.asked[0].params["structured_outputs"], answer.json()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", [None, "auto"])
@pytest.mark.parametrize(
    ("templates", "begin", "arguments"),
    [(None, "<tool_call>", "arguments"), (LLAMA, "", "parameters")],
)
def test_an_answer_is_a_message_of_the_format_or_calls(
    path: str, choice: Any, templates: Any, begin: str, arguments: str
) -> None:
    structure, _ = asked_by(path, "{}", templates, tool_choice=choice)
    assert json.loads(structure["json"]) == SCHEMA
    calls = json.loads(structure["calls"])
    assert calls["begin"] == begin and calls["several"]
    assert set(calls["schema"]["properties"]) == {"name", arguments}


@pytest.mark.parametrize("path", PATHS)
def test_one_call_is_let_through_where_calls_are_not_parallel(path: str) -> None:
    structure, _ = asked_by(path, "{}", parallel_tool_calls=False)
    assert json.loads(structure["calls"])["several"] is False


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_an_answer_of_calls_has_the_calls_schema_alone(path: str, choice: Any) -> None:
    choice = NAMED[path] if choice == "named" else choice
    text = '[{"name": "weather", "arguments": {}}]'
    structure, _ = asked_by(path, text, tool_choice=choice)
    assert "calls" not in structure
    assert json.loads(structure["json"])["type"] == "array"


@pytest.mark.parametrize("path", PATHS)
def test_without_calls_the_format_is_all(path: str) -> None:
    for templates, choice in ((None, "none"), (PlainTemplates("no calls"), "auto")):
        structure, _ = asked_by(path, "{}", templates, tool_choice=choice)
        assert "calls" not in structure and json.loads(structure["json"]) == SCHEMA


def test_messages_and_calls_come_as_they_are() -> None:
    _, answer = asked_by("/v1/chat/completions", CALL)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"town": "Rome"}'}
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    _, answer = asked_by("/v1/chat/completions", '{"n": 3}')
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == '{"n": 3}' and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("named", "stop")])
def test_a_call_is_a_reason_to_end_unless_the_request_has_named_it(
    stream: bool, choice: str, reason: str
) -> None:
    path = "/v1/chat/completions"
    client = ScriptedClient(TOKENIZER, ['[{"name": "weather", "arguments": {}}]'])
    chosen = NAMED[path] if choice == "named" else choice
    answer = say(client, path, {**CHAT, "tool_choice": chosen, "stream": stream})
    assert f'"finish_reason":"{reason}"' in answer.text.replace(" ", "")
    assert '"tool_calls":[' in answer.text.replace(" ", "")


@pytest.mark.parametrize(
    "asked", [{"guided_regex": "a+"}, {"structured_outputs": {"choice": ["a"]}}]
)
def test_a_structure_of_the_text_has_no_calls_beside_it(asked: dict[str, Any]) -> None:
    """As in vLLM: it may hold calls itself."""
    structure, _ = asked_by("/v1/chat/completions", "a", response_format=None, **asked)
    assert "calls" not in structure
