"""Log-probabilities of the model, or of the distribution that a token was sampled from."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from megatron_async.errors import ConfigError
from megatron_async.serving.http.frontend import ServerConfig
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import served

TEMPERATURE, TOP_K = 0.7, 5
SAMPLED: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": 3}
Pairs = list[tuple[float, list[float]]]
"""Of each token: its own, and those of the most likely ones."""


def _post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, timeout=PATIENCE_SECONDS)


def of_completions(url: str, **values: Any) -> Pairs:
    body = {"prompt": "abc", "max_tokens": 6, "logprobs": TOP_K, "ignore_eos": True}
    answer = _post(f"{url}/v1/completions", body | SAMPLED | values).raise_for_status()
    found = answer.json()["choices"][0]["logprobs"]
    each = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    return [(own, sorted(top.values())[-TOP_K:]) for own, top in each]


def of_chat(url: str, **values: Any) -> Pairs:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "logprobs": True}
    body |= {"top_logprobs": TOP_K, "ignore_eos": True}
    answer = _post(f"{url}/v1/chat/completions", body | SAMPLED | values)
    found = answer.raise_for_status().json()["choices"][0]["logprobs"]["content"]
    return [_pair(each) for each in found]


def of_responses(url: str, **values: Any) -> Pairs:
    body = {"input": "abc", "max_output_tokens": 6, "top_logprobs": TOP_K, "ignore_eos": True}
    body |= {"include": ["message.output_text.logprobs"]}
    answer = _post(f"{url}/v1/responses", body | SAMPLED | values).raise_for_status()
    found = answer.json()["output"][0]["content"][0]["logprobs"]
    return [_pair(each) for each in found]


def _pair(entry: dict[str, Any]) -> tuple[float, list[float]]:
    return entry["logprob"], sorted(top["logprob"] for top in entry["top_logprobs"])


def sampled_from(raw: Pairs) -> Pairs:
    """By hand: the raw ones over the temperature, and the share of each among the top k."""
    found = []
    for own, top in raw:
        total = math.log(sum(math.exp(each / TEMPERATURE) for each in top))
        found.append((own / TEMPERATURE - total, [each / TEMPERATURE - total for each in top]))
    return found


def near(pairs: Pairs) -> Any:
    return [(pytest.approx(own, abs=1e-4), pytest.approx(top, abs=1e-4)) for own, top in pairs]


@pytest.mark.parametrize("asked", (of_completions, of_chat, of_responses))
def test_processed_ones_are_of_what_was_sampled_from(asked: Any) -> None:
    with served(hash_engine(1, tokenizer=hash_tokenizer())) as made:
        raw = asked(made.url)
        assert asked(made.url, logprobs_mode="raw_logprobs") == raw
        assert asked(made.url, logprobs_mode="processed_logprobs") == near(sampled_from(raw))
        assert len(raw) > 2 and raw != near(sampled_from(raw))


@pytest.mark.parametrize("asked", (of_completions, of_chat, of_responses))
def test_the_server_says_which_a_request_gets_that_does_not_say(asked: Any) -> None:
    options: dict[str, Any] = {"development": True, "logprobs_mode": "processed_logprobs"}
    with served(hash_engine(1, tokenizer=hash_tokenizer()), **options) as made:
        shown = httpx.get(f"{made.url}/server_info").json()["vllm_config"]["model_config"]
        assert shown["logprobs_mode"] == "processed_logprobs"
        raw = asked(made.url, logprobs_mode="raw_logprobs")
        assert asked(made.url) == near(sampled_from(raw))


def test_processed_ones_of_greedy_choices_have_biases_and_no_filter() -> None:
    """As vLLM's at temperature 0: after biases and penalties, at temperature 1."""
    with served(hash_engine(1, tokenizer=hash_tokenizer())) as made:
        body = {"prompt": "abc", "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
        body |= {"temperature": 0.0, "top_p": 0.5}

        def first(**values: Any) -> tuple[int, float]:
            answer = httpx.post(f"{made.url}/v1/completions", json=body | values)
            choice = answer.raise_for_status().json()["choices"][0]
            return choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]

        processed = {"logprobs_mode": "processed_logprobs"}
        token, raw = first()
        assert first(**processed) == (token, pytest.approx(raw, abs=1e-4))
        biased = raw + 2.0 - math.log1p(math.exp(raw) * math.expm1(2.0))
        bias = {"logit_bias": {str(token): 2.0}}
        assert first(**bias) == (token, pytest.approx(raw, abs=1e-4))
        assert first(**bias, **processed) == (token, pytest.approx(biased, abs=1e-4))


def test_an_unknown_mode_is_refused_by_its_name() -> None:
    with served(hash_engine(1, tokenizer=hash_tokenizer())) as made:
        body = {"prompt": "a", "logprobs_mode": "processed_logits"}
        answer = httpx.post(f"{made.url}/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs_mode"


def test_the_engines_own_word_is_no_mode_of_a_server() -> None:
    wrong: Any = "processed"
    with pytest.raises(ConfigError, match="'processed' must be raw_logprobs or processed_logprobs"):
        ServerConfig(model_names=("m",), logprobs_mode=wrong)
