"""Wrong fields are told in this API's words, not in those of the library that checks them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

OF_THE_LIBRARY = re.compile(
    r"Input should|valid (?:string|integer|list|dict)|Field required|validation|pydantic|instance"
    r"|List should|String should|Value error",
    re.I,
)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": "x"}, "max_tokens: it must be an integer"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens: it must be an integer"),
    ("/v1/completions", {"prompt": "a", "top_p": []}, "top_p: it must be a number"),
    ("/v1/completions", {"prompt": "a", "stop": 3}, "stop: it must be a text or a list"),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream: it must be true or false"),
    ("/v1/completions", {}, "prompt: it is missing"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids[0]: it must be"),
    ("/v1/chat/completions", {"messages": 3}, "messages: it must be a list"),
    ("/v1/chat/completions", {"messages": [3]}, "messages[0]: it must be an object"),
    ("/v1/chat/completions", {"messages": [], "response_format": {"type": "xml"}},
     "response_format.type: it must be 'text', 'json_object' or 'json_schema'"),
    ("/v1/responses", {"input": 3}, "input: it must be a text or a list"),
    ("/detokenize", {"tokens": "a"}, "tokens: it must be a list"),
    ("/generate", {"text": "a", "sampling_params": {"min_p": "x"}},
     "sampling_params.min_p: it must be a number"),
    ("/generate", {"text": "a", "sampling_params": {"stop": 5, "top_k": {}}},
     "sampling_params.top_k: it must be an integer"),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"ignore_eos": "no"}]},
     "sampling_params[1].ignore_eos: it must be true or false"),
    ("/generate", {"text": "a", "sampling_params": "x"},
     "sampling_params: it must be an object or a list"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "said"), CASES)
def test_a_wrong_field_is_told_what_it_must_be(path: str, body: dict[str, Any], said: str) -> None:
    answer = say(ScriptedClient(tiny_tokenizer(), ["a"]), path, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(said), message


ODD: tuple[Any, ...] = (3, -1, 1.5, "a", "", True, [], [3], ["a", 3], {}, {"a": 3}, [[[]]])
FIELDS = (
    *("temperature", "n", "seed", "stop", "logit_bias", "stream_options", "response_format"),
    *("stop_token_ids", "structured_outputs", "tools", "model", "logprobs", "cache_salt"),
)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FIELDS)
def test_no_error_has_the_librarys_words(name: str) -> None:
    for value in ODD:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            asked = {**body, "max_tokens": 2, name: value}
            answer = say(ScriptedClient(tiny_tokenizer(), ["a"] * 3), path, asked)
            if answer.status_code != 200:
                said = json.dumps(answer.json())
                assert not OF_THE_LIBRARY.search(said), said
