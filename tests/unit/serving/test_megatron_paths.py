"""Megatron's paths without a version, as its own trainers call them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.chat.chat_template import ChatTemplates
from tests.support.engines import config_at
from tests.support.scripted_client import tiny_tokenizer
from tests.support.served import served

MESSAGES: list[Any] = [{"role": "user", "content": "def f("}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True}
SEEDS = range(3)


def tiny_served(**config: Any) -> Any:
    engine = DynamicInferenceEngine.from_pretrained("tiny", config_at(1, max_requests=4))
    templates = ChatTemplates.from_directory("tiny")
    return served(engine, tokenizer=tiny_tokenizer(), templates=templates, **config)


def test_the_call_of_megatrons_trainer() -> None:
    """``MegatronLocal.base_generate``, by the client that it has."""
    with tiny_served() as made, openai.OpenAI(base_url=made.url, api_key="NONE") as client:
        answer = client.chat.completions.create(
            model="", messages=MESSAGES, temperature=1.0, top_p=0.0, n=1, logprobs=True,
            max_tokens=12,
            extra_body={
                "skip_prompt_log_probs": True, "add_BOS": False, "return_tokenized_data": True,
                "return_raw_text": True,
            },
        )  # fmt: skip
    (choice,) = answer.choices
    message = choice.message.model_dump()
    ids = message["generation_token_ids"]
    assert len(message["generation_log_probs"]) == len(ids) > 0
    assert message["raw_text"].endswith(message["content"])
    tokenizer = tiny_tokenizer()
    assert (
        tokenizer.tokenize(message["raw_text"])[: len(message["prompt_token_ids"])]
        == (message["prompt_token_ids"])
    )


@pytest.mark.parametrize("written", (0, 1, 2))
def test_add_bos_says_whether_a_chat_has_a_begin_token(written: int) -> None:
    """One or none, as in Megatron's server, whatever the template writes."""
    tokenizer = tiny_tokenizer()

    def ids(count: int) -> list[int]:
        begin = tokenizer.bos_id
        assert begin is not None
        return [begin] * count + tokenizer.tokenize("def f(")

    source = "{{ bos_token }}" * written + "{{ messages[0].content }}"
    special = {"bos_token": str(tokenizer.token_name(ids(1)[0]))}
    templates = ChatTemplates({"default": source}, special)
    engine = DynamicInferenceEngine.from_pretrained("tiny", config_at(1, max_requests=4))
    with served(engine, tokenizer=tokenizer, templates=templates) as made:
        for asked, count in ((None, written), (True, 1), (False, 0)):
            body = {**CHAT, "max_tokens": 2, "add_BOS": asked}
            body |= {"return_tokenized_data": True, "return_raw_text": True}
            answer = httpx.post(f"{made.url}/chat/completions", json=body).raise_for_status()
            message = answer.json()["choices"][0]["message"]
            assert message["prompt_token_ids"] == ids(count)
            text = special["bos_token"] * count + "def f("
            assert message["raw_text"] == text + message["content"]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_a_top_p_of_nothing_is_off_there_alone(path: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "def f(", "max_tokens": 12, "ignore_eos": True}
    with tiny_served(sampling_defaults={"top_p": 1e-6}) as made:  # off, also where that is not

        def texts(prefix: str) -> set[str]:
            answers = [
                httpx.post(f"{made.url}{prefix}{path}", json={**body, "top_p": 0.0, "seed": seed})
                for seed in SEEDS
            ]
            return {str(answer.raise_for_status().json()["choices"]) for answer in answers}

        assert len(texts("")) == len(SEEDS)
        assert len(texts("/v1")) == 1


@pytest.mark.parametrize("name", ["return_tokenized_data", "return_raw_text"])
def test_what_a_stream_does_not_have_is_refused(name: str) -> None:
    with tiny_served() as made:
        body = {**CHAT, "stream": True, name: True}
        answer = httpx.post(f"{made.url}/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
