"""Chat turns that keep their token ids."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.chat.chat_template import ChatTemplates
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OWN: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4, 5]}
USER, NEXT = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
TURN = {"role": "assistant", "content": "said"}
BEHIND = "~<user>b~<assistant>"


def prompt_of(messages: list[Any], template: str = TEMPLATE, **body: Any) -> Any:
    """The prompt that the engine gets, or the error."""
    client = ScriptedClient(TOKENIZER, ["c"])
    chat = Chat(ChatTemplates({"default": template}))
    answer = say(client, PATH, {"messages": messages, **body}, chat)
    return client.asked[0].prompt if answer.status_code == 200 else answer.json()["error"]


def test_a_turn_goes_on_behind_its_tokens() -> None:
    kept = prompt_of([USER, TURN | OWN, NEXT])
    assert kept == [1, 2, 3, 4, 5, *TOKENIZER.tokenize(BEHIND)]
    assert prompt_of([USER, TURN | OWN, NEXT], prevent_retokenization=True) == kept


def test_the_token_that_ended_it_stands_once() -> None:
    (end,) = TOKENIZER.tokenize("~")
    ended = OWN | {"generation_token_ids": [4, end]}
    behind = TOKENIZER.tokenize(BEHIND)
    assert prompt_of([USER, TURN | ended, NEXT]) == [1, 2, 3, 4, *behind]


def test_the_last_turn_counts() -> None:
    later = TURN | {"prompt_token_ids": [7], "generation_token_ids": []}
    found = prompt_of([USER, TURN | OWN, NEXT, later, NEXT])
    assert found == [7, *TOKENIZER.tokenize(BEHIND)]


def test_an_answer_can_be_sent_back_as_it_is() -> None:
    client = ScriptedClient(TOKENIZER, ["said"])
    chat = Chat(ChatTemplates({"default": TEMPLATE}))
    body = {"messages": [USER], "return_tokenized_data": True}
    message = say(client, PATH, body, chat).json()["choices"][0]["message"]
    sampled = client.asked[0].prompt + message["generation_token_ids"]
    assert prompt_of([USER, message, NEXT]) == sampled + TOKENIZER.tokenize(BEHIND)


@pytest.mark.parametrize(
    ("turn", "body"),
    (
        (TURN, {}),
        (TURN | {"prompt_token_ids": [1]}, {}),
        (TURN | OWN | {"generation_token_ids": None}, {}),
        (TURN | OWN, {"prevent_retokenization": False}),
    ),
)
def test_else_all_text_is_tokenized(turn: dict[str, Any], body: dict[str, Any]) -> None:
    whole = TOKENIZER.tokenize("<user>a~<assistant>said~<user>b~<assistant>")
    assert prompt_of([USER, turn, NEXT], **body) == whole


def test_a_template_that_hides_the_turn_tokenizes_all_text() -> None:
    hides = "{{ messages[-1].content }}"
    assert prompt_of([USER, TURN | OWN, NEXT], hides) == TOKENIZER.tokenize("b")


@pytest.mark.parametrize("wrong", ("1", ["1"], [1.5], [True], {"1": 2}))
def test_what_is_no_list_of_ids_is_refused(wrong: Any) -> None:
    error = prompt_of([USER, TURN | OWN | {"generation_token_ids": wrong}, NEXT])
    assert error["param"] == "messages[1].generation_token_ids"
    assert "list of token ids" in error["message"]
