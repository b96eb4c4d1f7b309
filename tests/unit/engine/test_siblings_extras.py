"""Several sequences of one prompt with grammars, stop words and log-probabilities, at every depth.

The reference of each sequence is a request of its own with its seed, decoded alone and serially.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest

from megatron_async.engine.requests.siblings import sibling_seed
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.log_probs import check_log_probs

pytestmark = pytest.mark.sweep

DEPTHS = (0, 1, 2)
BLOCK = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK
SEED = 5
N = 3
GRAMMAR = "[a-f]{4,12}[0-9]+"
WORDS = ("k1", ",5s", "lcu")

FEATURES: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"regex": GRAMMAR}},
    "stop words": {"stop_words": WORDS, "ignore_eos": True},
    "log-probs": {"return_log_probs": True, "top_n_logprobs": 4, "ignore_eos": True},
    "penalties": {"presence_penalty": 1.5, "min_tokens": 20, "return_log_probs": True},
    "all": {
        "structured_outputs": {"regex": GRAMMAR}, "stop_words": ["7"], "top_n_logprobs": 2,
        "frequency_penalty": 0.5, "include_stop_str_in_output": True,
    },
}  # fmt: skip


def asked(**values: Any) -> SamplingParams:
    values = {"temperature": 1.2, "num_tokens_to_generate": 24, "seed": SEED, **values}
    return SamplingParams(**values)


def run(
    depth: int, asks: list[SamplingParams], **values: Any
) -> tuple[list[DynamicInferenceRequest], Any]:
    """Requests for PROMPT, one after the other, and the counters."""
    values = {"max_requests": 4, "block_size_tokens": BLOCK, "block_count": 90, **values}
    with hash_engine(depth, tokenizer=hash_tokenizer(), jitter_seed=depth, **values) as engine:
        requests = [engine.generate([PROMPT], ask)[0] for ask in asks]
        engine.scheduler.check_idle()
        return requests, engine.counters


@functools.cache
def alone(feature: str, index: int) -> DynamicInferenceRequest:
    values = {**FEATURES[feature], "seed": sibling_seed(SEED, index)}
    return run(0, [asked(**values)])[0][0]


def what_came(request: DynamicInferenceRequest) -> Any:
    return (
        request.generated_tokens,
        request.generated_text,
        request.finish_reason,
        request.stop_reason,
        request.generated_log_probs,
        request.generated_top_n_logprobs,
        request.prompt_log_probs,
        request.prompt_top_n_logprobs,
        request.seed,
    )


@pytest.mark.parametrize("caches", (True, False))
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_siblings_get_what_each_gets_alone(depth: int, feature: str, caches: bool) -> None:
    (request,), counters = run(
        depth, [asked(n=N, **FEATURES[feature])], enable_prefix_caching=caches
    )
    assert [what_came(choice) for choice in request.choices] == [
        what_came(alone(feature, index)) for index in range(N)
    ]
    assert len({tuple(choice.generated_tokens) for choice in request.choices}) == N
    for choice in request.choices:
        counts = choice.counters
        assert counts.launched == counts.committed + counts.discarded
        assert all(map(math.isfinite, choice.generated_log_probs or ()))
    first, *others = request.choices
    if first.prompt_log_probs is not None:
        check_log_probs(first)
        assert all(choice.prompt_log_probs is first.prompt_log_probs for choice in others)
    # The prompt is computed once, but for its last block, which is not full.
    shared = FULL_BLOCKS * BLOCK if caches else 0
    assert [choice.counters.cached for choice in request.choices] == [0, shared, shared]
    assert counters.tokens_cached == (N - 1) * shared


@pytest.mark.parametrize("depth", DEPTHS)
def test_features_show_in_every_sequence(depth: int) -> None:
    """The witnesses: none of these texts comes by itself."""
    names = ("grammar", "stop words", "all")
    requests, _ = run(depth, [asked(n=N, **FEATURES[name]) for name in names])
    grammar, words, both = requests
    for choice in grammar.choices:
        assert re.fullmatch(GRAMMAR, choice.generated_text or "")
    for choice in words.choices:
        text = choice.generated_text or ""
        assert choice.stop_reason in WORDS
        assert not any(word in text for word in WORDS)
    assert {choice.stop_reason for choice in words.choices} == set(WORDS)
    texts = [choice.generated_text or "" for choice in both.choices]
    assert all(re.fullmatch(GRAMMAR, text) for text in texts)
    assert [choice.stop_reason == "7" for choice in both.choices] == ["7" in t for t in texts]


@pytest.mark.parametrize("feature", ("grammar", "log-probs", "penalties"))
@pytest.mark.parametrize("depth", DEPTHS)
def test_best_of_keeps_the_likeliest_by_their_log_probs(depth: int, feature: str) -> None:
    count = 6
    values = {**FEATURES[feature], "return_log_probs": True, "skip_prompt_log_probs": True}
    plain = {name: value for name, value in values.items() if name != "return_log_probs"}
    plain.pop("top_n_logprobs", None)
    (every, best, unasked), _ = run(
        depth,
        [asked(n=count, **values), asked(n=2, best_of=count, **values),
         asked(n=2, best_of=count, **plain)],
    )  # fmt: skip

    def likelihood(choice: DynamicInferenceRequest) -> float:
        assert choice.generated_log_probs is not None
        check_log_probs(choice)
        return math.fsum(choice.generated_log_probs) / len(choice.generated_tokens)

    ranked = sorted(every.choices, key=likelihood, reverse=True)
    assert ranked != every.choices
    for kept in (best, unasked):
        assert [choice.generated_tokens for choice in kept.choices] == [
            choice.generated_tokens for choice in ranked[:2]
        ]
        assert all(choice.finish_reason is not FinishReason.ERROR for choice in kept.choices)
    assert [c.generated_log_probs for c in best.choices] == [
        c.generated_log_probs for c in ranked[:2]
    ]
    assert [c.generated_log_probs for c in unasked.choices] == [None, None]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_prompt_is_computed_once_for_all(depth: int) -> None:
    computed = {}
    for n in (1, N):
        tokens = 0

        class Prefilled:
            def on_launch(self, plan: Any) -> None:
                nonlocal tokens
                tokens += sum(len(chunk.tokens) for chunk in plan.prefills)

        with hash_engine(
            depth, max_requests=4, block_size_tokens=BLOCK, block_count=90, prefill_chunk_tokens=5
        ) as engine:
            engine.observe(Prefilled())
            engine.generate([PROMPT], asked(n=n, return_log_probs=True))
        computed[n] = tokens
    rest = len(PROMPT) - FULL_BLOCKS * BLOCK
    assert computed == {1: len(PROMPT), N: len(PROMPT) + (N - 1) * rest}
