"""How much a model is to reason: a variable of its chat template."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import PlainTemplates

TOKENIZER = tiny_tokenizer()
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


class ShowsVariables(PlainTemplates):
    """Templates that show the variables that they get beside the chat."""

    def render_chat(self, messages: Any, tools: Any = None, **options: Any) -> str:
        return str(sorted((options["chat_template_kwargs"] or {}).items()))


def prompt_of(path: str, body: dict[str, Any]) -> str:
    """The prompt that the engine gets."""
    client = ScriptedClient(TOKENIZER, ["b"])
    answer = say(client, path, body, ShowsVariables())
    assert answer.status_code == 200, answer.text
    return TOKENIZER.detokenize(client.asked[0].prompt)


@pytest.mark.parametrize("effort", ["low", "xhigh"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_the_effort_reaches_the_template(effort: str, variables: dict[str, Any]) -> None:
    shown = str(sorted({"reasoning_effort": effort, **variables}.items()))
    more = {"chat_template_kwargs": variables}
    assert prompt_of(CHATS, {**MESSAGES, "reasoning_effort": effort, **more}) == shown
    assert prompt_of(RESPONSES, {"input": "a", "reasoning": {"effort": effort}, **more}) == shown


def test_a_variable_of_the_template_goes_before_the_effort() -> None:
    given = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    body = {**MESSAGES, "reasoning_effort": "low", **given}
    assert prompt_of(CHATS, body) == "[('reasoning_effort', 'high')]"


@pytest.mark.parametrize("more", [{}, {"reasoning": None}, {"reasoning": {"summary": "auto"}}])
def test_without_an_effort_the_template_has_no_such_variable(more: dict[str, Any]) -> None:
    assert prompt_of(RESPONSES, {"input": "a", **more}) == "[]"
    assert prompt_of(CHATS, {**MESSAGES, "reasoning_effort": None}) == "[]"


def test_a_response_repeats_the_effort() -> None:
    body = {"input": "a", "reasoning": {"effort": "low"}}
    answer = say(ScriptedClient(TOKENIZER, ["b"]), RESPONSES, body).json()
    assert answer["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHATS, {**MESSAGES, "reasoning_effort": 3}, "reasoning_effort"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": ["low"]}}, "reasoning.effort"),
        (RESPONSES, {"input": "a", "reasoning": "low"}, "reasoning"),
        (RESPONSES, {"input": "a", "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_an_effort_that_is_no_text_is_an_error(path: str, more: Any, field: str) -> None:
    answer = say(ScriptedClient(TOKENIZER, ["b"]), path, more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
