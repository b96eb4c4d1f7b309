"""Texts that begin behind a thought: which tokens may come, budgets, and engines that heed them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RequestError
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.thought import Thought
from megatron_async.sampling_params import SamplingParams
from tests.support.scripted_client import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = TOKENIZER.vocab_size
OPEN, CLOSE, END = TOKENIZER.tokenize("^")[0], TOKENIZER.tokenize("~~"), VOCABULARY - 1
BREAK = TOKENIZER.tokenize("\n")[0]
DIGITS = {TOKENIZER.tokenize(digit)[0] for digit in "0123456789"}
COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY)
ALL = set(range(VOCABULARY))


def matcher(regex: str | None = "[0-9]{2}", **thought: Any) -> Any:
    values = {"closing": CLOSE, **thought}
    spec = StructuredOutputs(regex=regex, thought=values)
    return COMPILER.compile(spec).matcher((END,))


def allowed(text: Any) -> set[int]:
    row = np.zeros((VOCABULARY + 31) // 32, np.int32)
    text.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCABULARY]).tolist())


def take(text: Any, *tokens: int) -> Any:
    for token in tokens:
        assert token in allowed(text) and text.accept(token)
    return text


def test_a_structure_is_compiled_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, started = GrammarCompiler(TOKENIZER, VOCABULARY), []
    start = compiler._start
    monkeypatch.setattr(compiler, "_start", lambda *given: started.append(1) or start(*given))
    for budget in (1, 2):
        thought = {"closing": CLOSE, "budget": budget}
        compiler.compile(StructuredOutputs(regex="[0-9]", thought=thought))
        assert len(started) == 1


def test_any_token_may_come_until_the_thought_ends() -> None:
    text = matcher()
    assert allowed(text) == ALL - {END}
    take(text, *TOKENIZER.tokenize("a~b"), *CLOSE)
    assert allowed(text) == DIGITS | {BREAK}
    take(text, BREAK, BREAK)
    assert allowed(text) == DIGITS
    take(text, *TOKENIZER.tokenize("4"))
    assert allowed(text) == DIGITS and not text.must_end
    take(text, *TOKENIZER.tokenize("2"))
    assert text.must_end and allowed(text) == {END}
    assert take(text, END).must_end and allowed(text) == set() and text.error is None


def test_a_thought_may_be_opened_or_left_out() -> None:
    text = matcher(opening=OPEN)
    assert allowed(text) == DIGITS | {OPEN}
    assert not text.accept(BREAK) and allowed(text) == DIGITS | {OPEN}
    assert allowed(take(text.copy(), OPEN)) == ALL - {END}
    assert allowed(take(text, *TOKENIZER.tokenize("4"))) == DIGITS


def test_without_a_structure_any_text_follows() -> None:
    text = matcher(None, opening=OPEN, budget=1)
    assert allowed(text) == ALL
    assert allowed(take(text.copy(), *TOKENIZER.tokenize("a"))) == ALL
    take(text, BREAK, OPEN)
    assert allowed(text) == ALL, "it may end in a thought"
    take(text, *TOKENIZER.tokenize("a"), *CLOSE)
    assert allowed(text) == ALL and not text.must_end
    assert take(text, END).must_end


@pytest.mark.parametrize("budget", (0, 1, 5))
def test_a_budget_ends_the_thought(budget: int) -> None:
    forced = [*TOKENIZER.tokenize(" so"), *CLOSE]
    text = matcher(budget=budget, forced=forced)
    take(text, *TOKENIZER.tokenize("x" * budget))
    forced = forced if budget else CLOSE
    assert text.forced_tokens() == tuple(forced)
    for token in forced:
        assert allowed(text) == {token}
        take(text, token)
    assert allowed(text) == DIGITS | {BREAK}


def test_a_budget_that_ends_inside_of_the_tag_goes_on_with_it() -> None:
    text = take(matcher(budget=2, forced=[OPEN, *CLOSE]), OPEN, CLOSE[0])
    assert allowed(text) == {CLOSE[1]} and text.forced_tokens() == (CLOSE[1],)
    assert allowed(take(text, CLOSE[1])) == DIGITS | {BREAK}


def test_nothing_comes_between_the_parts_of_a_header() -> None:
    text = take(matcher(may_end=True), *TOKENIZER.tokenize("ab"), CLOSE[0])
    assert allowed(text) == {CLOSE[1]} and not text.accept(OPEN)
    assert OPEN in allowed(take(matcher(), CLOSE[0])), "another tag's first token is a text's too"


def test_end_tokens_may_come_where_it_says_so() -> None:
    assert END in allowed(matcher(may_end=True))
    assert take(matcher(may_end=True), END).must_end


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_a_mask_are_those_that_are_taken(seed: int) -> None:
    chance = random.Random(seed)
    more = {"opening": OPEN} if seed % 2 else {}
    text = matcher(None if seed % 3 == 0 else "[0-9]{2}", budget=chance.randrange(4), **more)
    for _ in range(20):
        may = allowed(text)
        for token in chance.sample(sorted(ALL), 20):
            assert text.copy().accept(token) == (token in may)
        if not may:
            break
        drafts = [chance.choice(sorted(may)) for _ in range(3)]
        ahead = [allowed(each) for each in text.along(drafts)]
        assert all(draft in before for draft, before in zip(drafts, ahead[:-1], strict=False))
        assert allowed(text) == may
        text.accept(chance.choice(sorted(may)))
    assert text.error is None


@pytest.mark.parametrize(
    ("thought", "said"),
    (
        ({}, "closing: give the tokens"),
        ({"closing": [1], "budget": -1}, "integers of 0 or more"),
        ({"closing": [1.5]}, "integers of 0 or more"),
        ({"closing": list(range(40))}, "at most 32 tokens"),
        ({"closing": [1], "forced": [2]}, "it ends with closing"),
        ({"closing": [1], "may_end": 1}, "true or false"),
        ({"closing": [1], "other": 1}, "of another form"),
        ({"closing": 1}, "of another form"),
        ("[]", "of another form"),
    ),
)
def test_another_form_is_refused(thought: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.thought: .*{said}"):
        StructuredOutputs(thought=thought)


def test_tokens_of_another_model_are_refused() -> None:
    with pytest.raises(RequestError, match=f"token id {VOCABULARY} is none of the model's"):
        matcher(closing=[VOCABULARY])
    kept = Thought(closing=(1, 2), opening=3, budget=4, forced=(5, 1, 2), may_end=True)
    assert Thought.from_json(kept.to_json()) == kept


def test_engines_give_the_serial_tokens_with_drafts_and_at_any_depth() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    compact = {"json": schema, "disable_any_whitespace": True}
    structures: list[dict[str, Any]] = [
        {**compact, "thought": {"closing": CLOSE, "budget": 7}},
        {**compact, "thought": {"closing": CLOSE, "budget": 3, "opening": OPEN}},
        {"regex": "[ab]{5}", "thought": {"closing": CLOSE, "budget": 0}},
        {"thought": {"closing": CLOSE, "budget": 6}},
    ]
    params = [
        SamplingParams(temperature=1.0, seed=n, num_tokens_to_generate=40, structured_outputs=each)
        for n, each in enumerate(structures)
    ]
    found = []
    with DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device="cpu")) as engine:
        for depth, drafts in ((0, 0), (1, 0), (2, 0), (0, 3), (2, 3), (4, 2)):
            drafting: dict[str, Any] = {"num_speculative_tokens": drafts} if drafts else {}
            config = EngineConfig(device="cpu", depth=depth, max_requests=4,
                                  inference_async_scheduling=depth > 0, **drafting)  # fmt: skip
            with engine.with_config(config) as other:
                done = other.generate(["def f(x):"] * len(params), params)
                found.append([request.generated_tokens for request in done])
                texts = [request.generated_text for request in done]
    assert all(each == found[0] for each in found)
    thought, _, answer = texts[0].partition("~~")
    assert len(thought) <= 7 and set(json.loads(answer)) == {"n"}
    answer = texts[1].partition("~~")[2] if texts[1].startswith("^") else texts[1]
    assert set(json.loads(answer)) == {"n"}
    assert texts[2].startswith("~~") and texts[2].strip("~\n") and set(texts[2]) <= set("ab~\n")
    assert "~~" in texts[3][: 6 + len("~~")]
