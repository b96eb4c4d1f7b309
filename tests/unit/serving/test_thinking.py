"""What a server asks of the engine for a thought: a structure behind it, its budget, its length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_async.grammar.thought import Thought
from megatron_async.serving.chat.answers.reasoning import tags_behind
from megatron_async.serving.chat.chat import Chat
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "own", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def tagged() -> Tokenizer:
    """The embedded model's, with tags in tokens of their own, those of harmony special."""
    file = Path(__file__).parents[3] / "megatron_async" / "assets" / "tiny" / "tokenizer.json"
    own = tokenizers.Tokenizer.from_file(str(file))
    own.add_tokens(["<think>", "</think>"])
    own.add_special_tokens(list(HARMONY))
    return Tokenizer(own)


TOKENIZER = tagged()
OPENING, CLOSING = (TOKENIZER.tokenize(tag)[0] for tag in ("<think>", "</think>"))


def asked(
    body: dict[str, Any],
    text: str = "{}",
    *,
    format: str | None = "qwen3",
    end: str = "",
    path: str = CHATS,
    tokenizer: Tokenizer = TOKENIZER,
) -> tuple[Thought | None, Any, Any]:
    """The thought that the engine is to expect, the structure behind it, and the answer, where the
    template ends with ``end``."""
    chat = Chat(ChatTemplates({"default": "<tool_call>" + end}), reasoning_format=format)
    client = ScriptedClient(tokenizer, [text])
    answer = say(client, path, body, chat)
    if answer.status_code != 200:
        return None, None, answer.json()
    structure = client.asked[0].params["structured_outputs"]
    if structure is None or "thought" not in structure:
        return None, structure, answer.json()
    thought = Thought.from_json(structure.pop("thought"))
    return thought, structure, answer.json()


def test_without_a_structure_or_a_budget_nothing_is_asked() -> None:
    assert asked(MESSAGES)[:2] == (None, None)


@pytest.mark.parametrize(
    ("format", "end", "opening"),
    (
        ("qwen3", "", OPENING),
        ("qwen3", "<think>\n", None),
        ("deepseek_r1", "", None),
        ("glm45", "", OPENING),
    ),
)
def test_a_structure_begins_behind_the_thought(format: str, end: str, opening: int | None) -> None:
    body = MESSAGES | {"response_format": FORMAT}
    text = ("" if opening is None else "<think>") + "so</think>\n\n{}"
    thought, structure, answer = asked(body, text, format=format, end=end)
    assert thought == Thought(closing=(CLOSING,), opening=opening, forced=(CLOSING,))
    assert json.loads(structure["json"]) == SCHEMA
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "{}")


@pytest.mark.parametrize("end", ("<think>\n\n</think>\n\n", "</think>"))
@pytest.mark.parametrize("format", ("qwen3", "deepseek_r1"))
def test_a_prompt_that_ends_the_thought_has_none(format: str, end: str) -> None:
    body = MESSAGES | {"response_format": FORMAT, "thinking_budget": 3}
    thought, structure, answer = asked(body, "{}", format=format, end=end)
    assert thought is None and structure is not None
    message = answer["choices"][0]["message"]
    assert message["content"] == "{}" and "reasoning_content" not in message


@pytest.mark.parametrize("format", ("qwen3", "openai_gptoss"))
def test_calls_that_are_required_come_behind_the_thought(format: str) -> None:
    body = MESSAGES | {"tools": [TOOL], "tool_choice": "required"}
    calls = '[{"name": "look", "arguments": {}}]'
    text = f"<think>so</think>{calls}"
    if format == "openai_gptoss":
        text = "<|channel|>analysis<|message|>so<|end|>"
        text += f"<|start|>assistant<|channel|>final<|message|>{calls}"
    thought, structure, answer = asked(body, text, format=format)
    assert thought is not None and "json" in structure
    assert thought.may_end == (format == "openai_gptoss")
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "so" and message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("path", (CHATS, RESPONSES))
def test_a_budget_is_of_the_thought_alone(path: str) -> None:
    body = (MESSAGES if path == CHATS else {"input": "a"}) | {"thinking_budget": 5}
    thought, structure, _ = asked(body, "<think>so</think>yes", path=path)
    assert structure == {} and thought is not None
    assert thought.budget == 5 and thought.forced == (CLOSING,) and not thought.may_end
    if path == CHATS:
        other = asked(MESSAGES | {"thinking_token_budget": 5})[0]
        assert other == thought


def test_a_budget_of_harmony_goes_on_to_the_answer() -> None:
    thought, _, _ = asked(MESSAGES | {"thinking_budget": 5}, format="openai_gptoss")
    assert thought is not None and thought.opening is None
    final = TOKENIZER.tokenize("<|channel|>final<|message|>")
    assert list(thought.closing) == final
    forced = TOKENIZER.tokenize("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert list(thought.forced) == forced


def test_a_server_that_knows_no_thoughts_refuses_a_budget() -> None:
    *_, answer = asked(MESSAGES | {"thinking_budget": 5}, format=None)
    assert answer["error"]["param"] == "thinking_budget"
    assert "--reasoning-parser" in answer["error"]["message"]
    *_, answer = asked(MESSAGES | {"thinking_budget": -1})
    assert answer["error"]["param"] == "thinking_budget"


def test_a_tag_of_several_tokens_opens_no_structure() -> None:
    """It cannot be told from the beginning of the structure."""
    plain = tiny_tokenizer()
    body = MESSAGES | {"response_format": FORMAT}
    thought, structure, _ = asked(body, tokenizer=plain)
    assert thought is None and structure is not None
    for more, field in ((body, None), (MESSAGES | {"thinking_budget": 2}, "thinking_budget")):
        *_, answer = asked(more, tokenizer=plain, end="<think>")
        assert "writes </think> in " in answer["error"]["message"]
        assert answer["error"]["param"] == field
    *_, answer = asked(body, tokenizer=plain, format="openai_gptoss")
    assert "writes <|channel|>final<|message|> in 27 tokens" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("text", "count"),
    (
        ("<think>so</think>yes", 4), ("yes", 0), ("\n<think>so", 3), ("\n\n\n\n<think>so", 0),
        ("<think></think>", 2),
    ),
)  # fmt: skip
@pytest.mark.parametrize("stream", (False, True))
def test_tokens_of_the_thought_are_counted(text: str, count: int, stream: bool) -> None:
    *_, answer = asked(MESSAGES, text) if not stream else (None,)
    if stream:
        chat = Chat(ChatTemplates({"default": "a"}), reasoning_format="qwen3")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        told = say(ScriptedClient(TOKENIZER, [text]), CHATS, MESSAGES | options, chat).text
        lines = [line for line in told.splitlines() if line.startswith("data: {")]
        answer = json.loads(lines[-1].removeprefix("data: "))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    *_, response = asked({"input": "a"}, text, path=RESPONSES)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    *_, plain = asked(MESSAGES, text, format=None)
    assert "completion_tokens_details" not in plain["usage"]


def test_a_tag_in_what_a_user_says_opens_nothing() -> None:
    from megatron_async.serving.chat.answers.reasoning import ReasoningFormat

    tags = tags_behind(ReasoningFormat.QWEN3, "user: <think>\nassistant:")
    assert tags is not None and tags.opening == "<think>"
