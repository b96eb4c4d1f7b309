"""A schema in a format of type ``json_object``, as llama.cpp and others have it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORMAT = {"type": "json_object", "schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "response_format": FORMAT},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": FORMAT,
    },
    "/v1/responses": {"input": "a", "text": {"format": FORMAT}},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_of_a_json_object_is_followed(path: str) -> None:
    client = ScriptedClient(tiny_tokenizer(), ["{}"])
    answer = say(client, path, BODIES[path])
    assert answer.status_code == 200, answer.text
    asked = client.asked[0].params["structured_outputs"]
    assert json.loads(asked["json"]) == SCHEMA and not asked.get("json_object")


@pytest.mark.parametrize("schema", [123, [1], "text"])
def test_a_schema_that_is_no_object_is_an_error(schema: Any) -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object", "schema": schema}}
    answer = say(ScriptedClient(tiny_tokenizer(), ["{}"]), "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.schema"
