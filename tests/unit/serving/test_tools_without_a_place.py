"""Tools whose model cannot see them: the log says so once, and each answer does."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from megatron_async.serving.chat.chat import Chat, ToolUse
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.chat.prompt import NO_PLACE
from megatron_async.serving.front_end.limited_worker import LimitedWorkers
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHOWS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + PLAIN
READS_ALONE = "{% if tools %}{% endif %}{% set tools = none %}" + PLAIN
ASKS_FOR = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "the weather"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {"input": "the weather", "tools": [{"type": "function", **FUNCTION}]},
}
CHAT = "/v1/chat/completions"
TOOLS = ToolUse(({"type": "function", "function": FUNCTION},))


def ask(path: str, source: str, **more: Any) -> Any:
    client = ScriptedClient(tiny_tokenizer(), ["yes", "no"])
    answer = say(client, path, BODIES[path] | more, ChatTemplates({"default": source}))
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return answer.json()
    lines = (line[6:] for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("source", "warned"),
    [(PLAIN, True), (READS_ALONE, True), (SHOWS, False), (ASKS_FOR, False)],
)
def test_an_answer_says_that_the_model_has_not_seen_its_tools(
    path: str, source: str, warned: bool
) -> None:
    assert ask(path, source).get("warnings") == ([NO_PLACE] if warned else None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("more", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_there_is_nothing_to_say(path: str, more: dict[str, Any]) -> None:
    assert "warnings" not in ask(path, PLAIN, **more)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_the_last_chunk_of_a_stream_says_it(more: dict[str, Any]) -> None:
    chunks = ask(CHAT, PLAIN, stream=True, **more)
    assert [chunk.get("warnings") for chunk in chunks] == [None] * (len(chunks) - 1) + [[NO_PLACE]]


def test_the_last_event_of_a_response_says_it() -> None:
    *_, last = ask("/v1/responses", PLAIN, stream=True)
    assert last["type"] == "response.completed" and last["response"]["warnings"] == [NO_PLACE]


def test_the_log_says_it_once_and_processes_know_it_too(caplog: pytest.LogCaptureFixture) -> None:
    templates = ChatTemplates({"default": PLAIN})

    async def test() -> None:
        pool = LimitedWorkers(ChatTemplates.__module__, templates.to_dict(), seconds=60)
        for chat in (Chat(templates), Chat(templates, renderer=pool)):
            caplog.clear()
            made = [await chat.prompt(MESSAGES, TOOLS) for _ in range(3)]
            chat.close()
            assert all(prompt == ("the weather", True) for prompt in made)
            assert [record.levelno for record in caplog.records] == [logging.WARNING]

    with caplog.at_level(logging.INFO, "megatron_async"):
        asyncio.run(test())


def test_a_template_for_tools_alone_is_a_place() -> None:
    chat = Chat(ChatTemplates({"default": PLAIN, "tool_use": SHOWS}))
    assert not asyncio.run(chat.prompt(MESSAGES, TOOLS)).hides_tools
