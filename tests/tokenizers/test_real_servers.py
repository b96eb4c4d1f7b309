"""Small random models with real vocabularies, served to the real ``openai`` client."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
import transformers

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.chat.chat_template import ChatTemplates
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import served
from tests.tokenizers.conftest import Real

PROMPTS = ("Hello ", " été 中文 😀", "def f(x):\n    return", "▁a")
SEEDS = range(2)
HELLO: Any = [{"role": "user", "content": "Hello, été 😀 "}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 9}, "unit": {"enum": ["°C", "K"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a place", "parameters": PARAMETERS},
}


@dataclass(frozen=True)
class Running:
    """A served model and its client."""

    real: Real
    client: openai.OpenAI
    templates: ChatTemplates

    def completion(self, **asked: Any) -> Any:
        return self.client.completions.create(model="tiny", **{"max_tokens": 16, **asked})

    def chat(self, **asked: Any) -> Any:
        given = {"model": "tiny", "max_completion_tokens": 16, **asked}
        return self.client.chat.completions.create(**given)

    def added(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """What ids add to a prompt's text, in transformers."""
        texts = [
            self.real.theirs.decode(each, skip_special_tokens=True)
            for each in (prompt, [*prompt, *ids])
        ]
        assert texts[1].startswith(texts[0])
        return str(texts[1][len(texts[0]) :])


@pytest.fixture(scope="module")
def running(
    real: Real, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp(real.name)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=real.ours.vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=real.theirs.eos_token_id,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for file in real.directory.iterdir():
        shutil.copy(file, directory)
    templates = ChatTemplates.from_directory(directory)
    if not templates.names:
        own = Path(__file__).parents[2] / "megatron_async" / "assets" / "tiny"
        templates = ChatTemplates.from_directory(own)
    engine = DynamicInferenceEngine.from_pretrained(directory, config_at(1, max_requests=4))
    with (
        served(engine, tokenizer=real.ours, templates=templates) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_SECONDS
        ) as client,
    ):
        yield Running(real, client, templates)


def ids_of(prompt: str, real: Real) -> list[int]:
    return list(real.theirs(prompt)["input_ids"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_texts_of_transformers(running: Running, prompt: str) -> None:
    before = ids_of(prompt, running.real)
    for seed in SEEDS:
        asked: Any = {"prompt": prompt, "seed": seed, "extra_body": {"return_token_ids": True}}
        (choice,) = running.completion(**asked).choices
        ids = [token for token in choice.token_ids if token not in running.real.ours.eos_ids]
        assert choice.text == running.added(before, ids), (seed, ids)
        chunks = [chunk.choices[0].text for chunk in running.completion(**asked, stream=True)]
        assert "".join(chunks) == choice.text


def test_a_stop_string_ends_a_completion(running: Running) -> None:
    for seed in SEEDS:
        asked: Any = {"prompt": "Hello", "seed": seed}
        text = running.completion(**asked).choices[0].text
        stop = text[len(text) // 2 :][:3]
        if not stop:
            continue
        (choice,) = running.completion(**asked, stop=[stop]).choices
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.text == text.partition(stop)[0]
        chunks = [c.choices[0].text for c in running.completion(**asked, stop=[stop], stream=True)]
        assert "".join(chunks) == choice.text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_echoed_prompt_has_its_tokens_and_offsets(running: Running, prompt: str) -> None:
    (choice,) = running.completion(prompt=prompt, echo=True, logprobs=3, max_tokens=0).choices
    ids, shown = ids_of(prompt, running.real), choice.logprobs
    assert choice.text == prompt
    text = running.real.theirs.decode(ids, skip_special_tokens=True)
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.text_offset) == len(ids)
    assert shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
    for n, (name, offset) in enumerate(zip(shown.tokens, shown.text_offset, strict=True)):
        if name.startswith("bytes:") or ids[n] in running.real.ours.special_ids:
            continue
        # A text that begins with a word begins without its space.
        assert text.startswith((name, name[1:]) if offset == 0 else name, offset), n
    for name, own, tops in zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True):
        assert own is None or (tops[name] == own and len(tops) in (3, 4))


def test_a_chat_is_that_of_transformers(running: Running) -> None:
    prompt = running.templates.render_chat(HELLO)
    before = running.real.theirs(prompt, add_special_tokens=False)["input_ids"]
    for seed in SEEDS:
        asked: Any = {"messages": HELLO, "seed": seed, "logprobs": True, "top_logprobs": 2}
        whole = running.chat(**asked)
        assert whole.usage.prompt_tokens == len(before)
        chunks = list(running.chat(**asked, stream=True))
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        content = whole.choices[0].message.content
        assert "".join(delta.content or "" for delta in deltas) == content
        shown = whole.choices[0].logprobs.content
        special = {running.real.ours.token_name(n) for n in running.real.ours.special_ids}
        raw = b"".join(bytes(each.bytes) for each in shown if each.token not in special)
        assert raw.decode(errors="replace").lstrip(" ") == content.lstrip(" ")
        for each in shown:
            if "\ufffd" not in each.token:
                assert bytes(each.bytes).decode() == each.token


def test_a_structured_answer_conforms(running: Running) -> None:
    form = {"json": PARAMETERS, "whitespace_pattern": " ?"}
    asked: Any = {"messages": HELLO, "max_completion_tokens": 300}
    for seed in SEEDS:
        answer = running.chat(**asked, seed=seed, extra_body={"structured_outputs": form})
        assert answer.choices[0].finish_reason == "stop"
        jsonschema_rs.validate(PARAMETERS, json.loads(answer.choices[0].message.content))


def test_calls_and_their_results_go_back_and_forth(running: Running) -> None:
    asked: Any = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    asked |= {"parallel_tool_calls": False, "max_completion_tokens": 400}
    (choice,) = running.chat(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema_rs.validate(PARAMETERS, json.loads(call.function.arguments))
    with running.client.chat.completions.stream(model="tiny", **asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    said = choice.message.model_dump(exclude={"reasoning", "reasoning_content"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    turn = [*HELLO, said, result]
    if running.real.name == "gemma3":  # its template has users and models alone
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            running.chat(messages=turn, tools=[TOOL])
        return
    answer = running.chat(messages=copy.deepcopy(turn), tools=[TOOL], tool_choice="none", seed=2)
    assert answer.usage.prompt_tokens > 3
