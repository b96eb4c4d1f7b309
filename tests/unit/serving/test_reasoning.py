"""Thoughts apart from answers, in each family's format, however the text is divided."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.serving.chat.answers.harmony import HarmonyParser
from megatron_async.serving.chat.answers.message import Message
from megatron_async.serving.chat.answers.reasoning import (
    ReasoningFormat,
    ThoughtParser,
    begins_inside,
)
from megatron_async.serving.chat.chat import Chat, ToolUse
from megatron_async.serving.chat.chat_template import ChatTemplates
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

PLAIN = ChatTemplates({"default": "{{ messages[0].content }}"})
HERMES = ChatTemplates({"default": "<tool_call>{{ messages[0].content }}"})
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"name": "look", "arguments": {"at": "<think>"}}
TAGGED = {
    "<think>\nso\n</think>\n\nyes": ("so", "yes"),
    "  <think>a <b> </thin </think>\nx <think>y</think>": ("a <b> </thin", "x <think>y</think>"),
    "<think></think>yes": ("", "yes"),
    "<think>never ends \n": ("never ends", ""),
    "<think": ("", "<think"),
    "<thinking>": ("", "<thinking>"),
    "\n yes </think>": ("", "\n yes </think>"),
    "": ("", ""),
}
INSIDE = {
    "so \n</think>\n\n\nyes\n": ("so", "yes\n"),
    "\n</think>yes": ("", "yes"),
    "so </thin": ("so </thin", ""),
    "</think>": ("", ""),
    "\n<think>\nso</think>yes": ("so", "yes"),
    "<think><think></think>": ("<think>", ""),
    "<think>": ("", ""),
    " <thi": ("<thi", ""),
}


def parts(text: str, cuts: list[int]) -> list[str]:
    """``text``, divided at ``cuts``."""
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def divided(text: str, pieces: list[str], *, inside: bool) -> tuple[str, str]:
    parser = ThoughtParser(inside=inside)
    found = [*(parser.push(piece) for piece in pieces), parser.finish()]
    assert "".join(pieces) == text
    return "".join(a for a, _ in found), "".join(b for _, b in found)


@pytest.mark.parametrize(
    ("text", "expected", "inside"),
    [(text, found, False) for text, found in TAGGED.items()]
    + [(text, found, True) for text, found in INSIDE.items()],
)
def test_a_thought_is_parted_from_the_rest(
    text: str, expected: tuple[str, str], inside: bool
) -> None:
    assert divided(text, [text], inside=inside) == expected
    assert divided(text, list(text), inside=inside) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "</", "think>", "<"])),
    st.lists(st.integers(0, 100), max_size=5),
    st.booleans(),
)
def test_how_a_text_is_divided_changes_nothing(
    words: list[str], cuts: list[int], inside: bool
) -> None:
    text = "".join(words)
    whole = divided(text, [text], inside=inside)
    assert divided(text, parts(text, cuts), inside=inside) == whole


def test_a_prompt_may_open_the_thought() -> None:
    for format in ReasoningFormat:
        assert begins_inside(format, "...<|im_start|>assistant\n<think>\n")
        assert not begins_inside(format, "...assistant\n<think>\n\n</think>\n\n")
        assert begins_inside(format, "<think> of the user\nassistant\n") == (
            format is ReasoningFormat.DEEPSEEK_R1
        )


ANALYSIS = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
HARMONY = {
    f"{ANALYSIS}<|channel|>final<|message|>yes<|return|>": ("so", "yes", []),
    f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>': (
        "so", "I look.", [("look", '{"at": 1}')],
    ),
    ' to=functions.look<|channel|>commentary json<|message|>{"at"<|end|>': (
        "", "", [("look", '{"at"')],
    ),
    "<|channel|>commentary to=functions.other<|message|>{}<|call|>": ("", "{}", []),
    "<|channel|>analysis<|message|>never <|en": ("never <|en", "", []),
    "<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b": ("", "ab", []),
    "no header": ("", "no header", []),
    "to": ("", "to", []),
    "t": ("", "t", []),
    "<|channel|>fin": ("", "", []),
}  # fmt: skip


def harmony(pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    chat = Chat(PLAIN, reasoning_format="openai_gptoss")
    parser, message = chat.parser(ToolUse(tools=(TOOL,)), "<|start|>assistant"), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    found = message.to_dict()
    calls = [tuple(call["function"].values()) for call in found.get("tool_calls", ())]
    ended = parser.finish_reason("stop")
    assert ended == ("tool_calls" if calls else "stop")
    return found.get("reasoning_content", ""), found["content"] or "", calls


@pytest.mark.parametrize(("text", "expected"), HARMONY.items())
def test_channels_of_harmony(text: str, expected: tuple[Any, ...]) -> None:
    assert harmony([text]) == expected
    assert harmony(list(text)) == expected


@given(
    st.lists(
        st.sampled_from(
            ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", "final", "a", "<|",
             " to=functions.look", "commentary"]
        )
    ),
    st.lists(st.integers(0, 200), max_size=5),
)  # fmt: skip
def test_how_channels_are_divided_changes_nothing(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    assert harmony(parts(text, cuts)) == harmony([text])


@pytest.mark.parametrize("begun", ["", "<|channel|>", "<|channel|>analysis", "<|channel|>a to=f"])
@pytest.mark.parametrize("step", [1, 100])
def test_a_header_that_a_budget_cuts_short_is_not_the_answers(begun: str, step: int) -> None:
    text = f"{begun}<|end|><|start|>assistant<|channel|>final<|message|>yes"
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    assert harmony(pieces)[:2] == ("", "yes")


def test_what_is_no_message_of_a_model_is_bounded() -> None:
    parser = HarmonyParser()
    found = [*parser.push("<|channel|>" + "x" * 600), *parser.push("y"), *parser.finish()]
    assert "".join(found) == "<|channel|>" + "x" * 600 + "y"


@pytest.mark.parametrize("step", (1, 1000))
def test_calls_begin_behind_the_thought(step: int) -> None:
    chat = Chat(HERMES, reasoning_format="qwen3")
    call = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    text = f"<think>{call}</think>\n\nWell.{call}"
    tools = ToolUse(tools=(TOOL,))
    assert chat.markers(tools) == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    for shows in (True, False):
        parser, message = chat.parser(tools, "", shows_thought=shows), Message()
        for at in range(0, len(text), step):
            message.add(parser.push(text[at : at + step]))
        message.add(parser.finish())
        found = message.to_dict()
        assert found.get("reasoning_content") == (call if shows else None)
        assert found["content"] == "Well." and len(found["tool_calls"]) == 1
        assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == CALL["arguments"]


def test_a_thought_alone_has_no_content() -> None:
    parser, message = Chat(PLAIN, reasoning_format="qwen3").parser(ToolUse(), ""), Message()
    message.add(parser.push("<think>so"))
    message.add(parser.finish())
    assert message.to_dict()["content"] is None
    assert Chat(PLAIN).markers(ToolUse()) == ()


# --- over HTTP ------------------------------------------------------------------------------------

TOKENIZER = tiny_tokenizer()
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
TEXT = "<think>\nso\n</think>\n\nyes"


def told(path: str, body: dict[str, Any], text: str = TEXT, size: int = 1) -> Any:
    """The answer of a model that says ``text``: its JSON, or its events."""
    chat = Chat(PLAIN, reasoning_format="qwen3")
    answer = say(ScriptedClient(TOKENIZER, [text] * 2, sizes=(size,)), path, body, chat)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_chat_has_its_thought_beside_its_content() -> None:
    for choice in told(CHATS, MESSAGES | {"n": 2})["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    (choice,) = told(CHATS, MESSAGES | {"include_reasoning": False})["choices"]
    assert "reasoning_content" not in choice["message"] and choice["message"]["content"] == "yes"
    (choice,) = told(CHATS, MESSAGES, text="yes")["choices"]
    assert "reasoning_content" not in choice["message"] and choice["message"]["content"] == "yes"


@pytest.mark.parametrize("size", (1, 3, 100))
def test_a_streamed_thought_comes_first(size: int) -> None:
    chunks = told(CHATS, MESSAGES | {"stream": True}, size=size)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    thoughts = [n for n, delta in enumerate(deltas) if "reasoning_content" in delta]
    contents = [n for n, delta in enumerate(deltas) if delta.get("content")]
    assert "".join(deltas[n]["reasoning_content"] for n in thoughts) == "so"
    assert "".join(deltas[n]["content"] for n in contents) == "yes"
    assert max(thoughts) < min(contents)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_response_has_an_item_of_reasoning() -> None:
    thought, message = told(RESPONSES, {"input": "a"})["output"]
    assert thought["type"] == "reasoning" and message["type"] == "message"
    assert thought["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert message["content"][0]["text"] == "yes"


def test_a_streamed_response_has_events_of_reasoning() -> None:
    events = told(RESPONSES, {"input": "a", "stream": True})
    deltas = [each for each in events if each["type"] == "response.reasoning_text.delta"]
    assert "".join(each["delta"] for each in deltas) == "so"
    (done,) = (each for each in events if each["type"] == "response.reasoning_text.done")
    assert done["text"] == "so" and done["output_index"] == 0
    items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert events[-1]["response"]["output"] == items
