"""Items of reasoning, which clients send back with the rest of a response's output."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.serving.endpoints.responses_input import InputMessages
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

REASONING: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "3"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"summary": [{"type": "summary_text", "text": "so"}], "status": "completed"},
        {"content": [{"type": "reasoning_text", "text": "so"}], "encrypted_content": None},
    ],
)
def test_reasoning_is_taken_and_left_out(more: dict[str, Any]) -> None:
    reasoning = {**REASONING, **more}
    items = [USER, reasoning, CALL, OUTPUT, reasoning]
    assert InputMessages(items).messages == InputMessages([USER, CALL, OUTPUT]).messages
    client = ScriptedClient(tiny_tokenizer(), ["b"])
    answer = say(client, "/v1/responses", {"input": items})
    assert answer.status_code == 200, answer.text


def test_an_error_behind_reasoning_names_its_own_item() -> None:
    client = ScriptedClient(tiny_tokenizer(), ["b"])
    answer = say(client, "/v1/responses", {"input": [REASONING, {"type": "message"}]})
    assert answer.status_code == 400
    assert "input[1]" in answer.json()["error"]["message"]
