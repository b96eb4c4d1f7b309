"""Thoughts with real tokenizers and templates: tags in one token, prompts that open or end them,
and answers that are divided as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_async.grammar.thought import Thought
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.chat.answers.message import Message
from megatron_async.serving.chat.answers.reasoning import ReasoningFormat, tags_behind
from megatron_async.serving.chat.chat import Chat, ToolUse
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.http.errors import ApiError
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support import real_tokenizers
from tests.tokenizers.conftest import WITHOUT_TEMPLATE, available

FINAL = "<|start|>assistant<|channel|>final<|message|>"
FAMILIES = {
    "qwen3": ("qwen3", "<think>\nso\n</think>\n\nyes"),
    "qwen3 as R1": ("deepseek_r1", "so\n</think>\n\nyes"),
    "qwen3 as Qwen3.5": ("qwen3", "so\n</think>\n\nyes"),
    "qwen3 as GLM": ("glm45", "\n<think>so</think>\nyes"),
    "gptoss": ("openai_gptoss", f"<|channel|>analysis<|message|>so<|end|>{FINAL}yes"),
}
TEMPLATES = {
    "gptoss": WITHOUT_TEMPLATE["gptoss"],
    "qwen3 as R1": "llama-cpp-deepseek-r1",
    "qwen3 as Qwen3.5": "Qwen3.5-4B",
    "qwen3 as GLM": "GLM-4.6",
}
MESSAGES = [{"role": "user", "content": "<think> of it"}]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    name = request.param.partition(" ")[0]
    directory = available(lambda: real_tokenizers.tokenizer_directory(name))
    template: Path | None = None
    if request.param in TEMPLATES:
        folder = available(real_tokenizers.templates_directory)
        template = folder / f"{TEMPLATES[request.param]}.jinja"
    templates = ChatTemplates.from_directory(directory, chat_template=template)
    return FAMILIES[request.param], Tokenizer.from_directory(directory), templates


def test_an_answer_is_divided_token_by_token(family: Any) -> None:
    (format, text), tokenizer, templates = family
    chat = Chat(templates, reasoning_format=format)
    prompt = templates.render_chat(MESSAGES, add_generation_prompt=True)
    ids = tokenizer.tokenize(text)
    markers = tokenizer.special_tokens(chat.markers(ToolUse()))
    stream = tokenizer.stream_after(tokenizer.tokenize(prompt), True, tuple(markers))
    parser, message = chat.parser(ToolUse(), prompt, markers.values()), Message()
    for token in ids:
        message.add(parser.push(stream.push(token)))
    message.add(parser.push(stream.flush()))
    message.add(parser.finish())
    found = message.to_dict()
    assert (found["reasoning_content"], found["content"]) == ("so", "yes")


def test_budgets_and_structures_have_the_models_tags(family: Any) -> None:
    (format, text), tokenizer, templates = family
    chat = Chat(templates, reasoning_format=format)
    prompt = templates.render_chat(MESSAGES, add_generation_prompt=True)
    thinking = chat.thinking(tokenizer, prompt)
    asked = thinking.guide(SamplingParams(structured_outputs={"regex": "yes"}), 5)
    assert asked.structured_outputs is not None
    thought = Thought.from_json(asked.structured_outputs["thought"])
    ids = tokenizer.tokenize(text)
    size = len(thought.closing)
    ends = [n for n in range(len(ids)) if tuple(ids[n : n + size]) == thought.closing]
    assert len(ends) == 1
    opens = text.lstrip().startswith("<think>")
    assert thought.opening == (tokenizer.tokenize("<think>")[0] if opens else None)
    assert format == "openai_gptoss" or size == 1
    counter = thinking.counter()
    counter.add(ids)
    begin = 0 if thought.opening is None else ids.index(thought.opening)
    assert counter.count == ends[0] + size - begin


def test_a_template_that_does_not_think_ends_the_thought() -> None:
    directory = available(lambda: real_tokenizers.tokenizer_directory("qwen3"))
    templates = ChatTemplates.from_directory(directory)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    prompt = templates.render_chat(MESSAGES, add_generation_prompt=True, **off)
    assert tags_behind(ReasoningFormat.QWEN3, prompt) is None
    prompt = templates.render_chat(MESSAGES, add_generation_prompt=True)
    assert tags_behind(ReasoningFormat.QWEN3, prompt) is not None


def test_a_tokenizer_without_the_tag_is_named() -> None:
    directory = available(lambda: real_tokenizers.tokenizer_directory("deepseek_v3"))
    chat = Chat(ChatTemplates.from_directory(directory), reasoning_format="deepseek_r1")
    thinking = chat.thinking(Tokenizer.from_directory(directory), "a")
    with pytest.raises(ApiError, match="writes </think> in "):
        thinking.guide(SamplingParams(), 5)
