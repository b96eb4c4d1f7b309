"""Chats with real templates, beside transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_async.errors import RequestError
from megatron_async.serving.chat.answers.tool_calls import new_call_id
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.chat.template_sandbox import SandboxedTemplate
from megatron_async.serving.chat.template_wants import Wants
from tests.support import real_tokenizers
from tests.tokenizers.conftest import Real, available
from tests.tokenizers.generated import conversations

COUNT, SHORT = 500, 40
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
Messages = list[dict[str, Any]]

WANTS_NONE = ("DeepSeek-R1-Distill", "deepseek_v3", "rwkv-world")
"""Templates that show a call where content is None and nowhere else. ``apply_chat_template`` of
transformers 5 leaves None out of messages, and fails on them."""
WANTS_TEXT = ("DeepSeek-R1-Distill-Llama", "deepseek_v3", "functionary-medium-v3.2")
"""Templates that join arguments as text."""


def documented(messages: Messages, name: str) -> Messages:
    """The messages as transformers wants them for a template: arguments as objects, and an empty
    content in calls."""
    made = copy.deepcopy(messages)
    for message in made:
        if "tool_calls" in message and not message["content"]:
            message["content"] = None if any(part in name for part in WANTS_NONE) else ""
        for call in message.get("tool_calls", ()):
            if not any(part in name for part in WANTS_TEXT):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return made


def outcome(render: Callable[[], str]) -> str | None:
    """The text; None where the template refuses the chat."""
    try:
        return render()
    except Exception:  # whatever a template raises
        return None


def same_as_transformers(
    templates: ChatTemplates, theirs: Callable[..., str], name: str, count: int
) -> Iterator[str]:
    """The texts that both make. Both refuse the same chats."""
    for messages, tools in conversations(count):
        open_turn = messages[-1]["role"] != "assistant"
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": open_turn}
        wanted = documented(messages, name)
        expected = outcome(lambda: theirs(wanted, **given))  # noqa: B023 - called at once
        made = outcome(lambda: templates.render_chat(messages, **given))  # noqa: B023
        assert made == expected, (messages, tools)
        if made is not None:
            yield made


def test_chats_are_those_of_transformers(real: Real, template_file: Path | None) -> None:
    source = real.theirs.chat_template
    if template_file is not None:
        source = template_file.read_text("utf-8")
    templates = ChatTemplates.from_directory(real.directory, chat_template=template_file)

    def applied(messages: Messages, **given: Any) -> str:
        given |= {"chat_template": source, "tokenize": False}
        text: str = real.theirs.apply_chat_template(messages, **given)
        return text

    theirs = applied
    if real.name in WANTS_NONE:
        theirs = theirs_of(source, **real.theirs.special_tokens_map)
    made = [*same_as_transformers(templates, theirs, real.name, COUNT)]
    assert len(made) > COUNT / 8
    encoded = real.theirs(made, add_special_tokens=False)["input_ids"]
    assert [real.ours.tokenize(text) for text in made] == encoded


def published() -> Iterator[tuple[str, str]]:
    for file in sorted(real_tokenizers.templates_directory().iterdir()):
        yield file.stem, file.read_text("utf-8")
    yield "SmolLM2", real_tokenizers.smollm2_template()
    for name in real_tokenizers.NAMES:
        config = real_tokenizers.tokenizer_directory(name) / "tokenizer_config.json"
        source = json.loads(config.read_text("utf-8")).get("chat_template")
        if source is not None:
            yield name, source


class Published(NamedTuple):
    """A template, here and in transformers."""

    ours: ChatTemplates
    theirs: Callable[..., str]
    wants: Wants


@pytest.fixture(scope="module")
def all_published() -> dict[str, Published]:
    sources: dict[str, str] = dict(available(lambda: list(published())))
    return {
        name: Published(
            ChatTemplates({"default": source}, TOKENS),
            theirs_of(source),
            SandboxedTemplate(source, name).wants,
        )
        for name, source in sources.items()
    }


def theirs_of(source: str, **tokens: str) -> Callable[..., str]:
    def render(messages: Messages, **given: Any) -> str:
        given |= tokens or TOKENS
        (text,), _ = render_jinja_template([messages], chat_template=source, **given)
        return str(text)

    return render


def test_all_templates_make_what_they_make_in_transformers(
    all_published: dict[str, Published],
) -> None:
    for name, (templates, theirs, _) in all_published.items():
        try:
            for _ in same_as_transformers(templates, theirs, name, SHORT):
                pass
        except AssertionError as error:
            raise AssertionError(name) from error


def test_what_the_server_says_can_be_said_again(all_published: dict[str, Published]) -> None:
    """A call as the server returns it, with null for content and its own kind of id."""
    for name, (templates, theirs, _) in all_published.items():
        call = {"id": new_call_id(), "type": "function"}
        call["function"] = {"name": "find", "arguments": '{"what": "probe"}'}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        chat = [{"role": "user", "content": "?"}, said]
        chat.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
        own = documented(chat, name)
        for holder, key in ((own[1]["tool_calls"][0], "id"), (own[2], "tool_call_id")):
            holder[key] = holder[key][-9:]  # Mistral's templates refuse others
        if outcome(lambda: theirs(own)) is not None:  # noqa: B023
            text = templates.render_chat(chat)
            assert ("probe" in text) == ("probe" in theirs(own)), name


def test_parts_of_text_are_taken_by_all(all_published: dict[str, Published]) -> None:
    for name, (templates, *_) in all_published.items():
        for messages, tools in conversations(SHORT, seed=4):
            parted = copy.deepcopy(messages)
            for message in parted:
                if message["content"]:
                    message["content"] = [{"type": "text", "text": message["content"]}]
            whole = outcome(lambda: templates.render_chat(messages, tools))  # noqa: B023
            parts = outcome(lambda: templates.render_chat(parted, tools))  # noqa: B023
            assert (whole is None) == (parts is None), (name, messages)
            # No part is shown as Python does it.
            assert parts is None or "'type': 'text'" not in parts, name


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video"])
def test_images_are_refused_by_name(all_published: dict[str, Published], kind: str) -> None:
    for templates, *_ in all_published.values():
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]\.type"):
            parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:,"}}]
            templates.render_chat([{"role": "user", "content": parts}])


def test_final_message_is_left_open_as_in_transformers(all_published: dict[str, Published]) -> None:
    for name, (templates, theirs, _) in all_published.items():
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the begin"}]
        given = {"continue_final_message": True}
        expected = outcome(lambda: theirs(chat, **given))  # noqa: B023
        assert outcome(lambda: templates.render_chat(chat, **given)) == expected, name  # noqa: B023


def test_templates_ask_for_what_is_known_of_them(all_published: dict[str, Published]) -> None:
    wants = {name: each.wants for name, each in all_published.items()}
    for name, each in wants.items():
        assert each.arguments_text == any(part in name for part in WANTS_TEXT), name
    assert wants["deepseek_v3"].none and not wants["qwen3"].none and not wants["SmolLM2"].none
    assert {wants[name].id_length for name in ("mistral_nemo", "qwen3")} == {9, None}
