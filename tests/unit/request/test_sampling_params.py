"""What users may ask: every value is taken over in Python's own types or refused by name, and what
S is asked beyond the plain parameters follows from it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async import sampling_params
from megatron_async.engine import commands
from megatron_async.engine.requests.guidance import Grammars
from megatron_async.engine.requests.request_validation import RequestValidator
from megatron_async.errors import RequestError
from megatron_async.request.parameter_ranges import MAX_SEQUENCES
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.scheduler.limits import Limits
from megatron_async.serving.endpoints.request_shapes import CompletionRequest
from megatron_async.serving.messages import Generate
from megatron_async.step.extras import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    PROCESSED_LOG_PROBS,
    RAW_LOG_PROBS,
    Extras,
)

VOCABULARY = 300
EOD = 256
FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def no_change(tokens: list[int], logits: Any) -> Any:
    """A logits processor."""
    return logits


class Letters:
    """A tokenizer of bytes, and of the words that it is made with, which are tokens of their own:
    ``256 + 1 + index``."""

    eod = EOD

    def __init__(self, *words: str) -> None:
        self._ids = {word: EOD + 1 + index for index, word in enumerate(words)}

    def tokenize(self, text: str) -> list[int]:
        return [self._ids[text]] if text in self._ids else list(text.encode())


def validator(tokenizer: Any = None, **values: Any) -> RequestValidator:
    """For a vocabulary of 300 tokens and sequences of at most 64."""

    def tokenize_prompt(prompt: str, add_BOS: bool = False) -> list[int]:
        if tokenizer is None:
            raise RequestError("the model has no tokenizer; give the prompt as token ids")
        ids: list[int] = tokenizer.tokenize(prompt)
        return ids

    limits = Limits(
        max_requests=2,
        slot_count=4,
        block_count=64,
        block_size=4,
        max_tokens=64,
        prefill_chunk_tokens=64,
        max_assignments=64,
    )
    controller = SimpleNamespace(
        tokenizer=tokenizer, tokenize_prompt=tokenize_prompt, sampling_defaults=None
    )
    own = {"grammars": Grammars(tokenizer, VOCABULARY), "extras_enabled": True}
    values = {"random_seed": 0, "eos_token_ids": None, **own, **values}
    return RequestValidator(
        controller, limits, vocab_size=VOCABULARY, max_sequence_length=64, **values
    )


def extras_of(tokenizer: Any = None, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Any:
    """What S is asked; None for nothing."""
    values = {"num_tokens_to_generate": 20, **params}
    command, _ = validator(tokenizer).add(0, 0, list(prompt), SamplingParams(**values), 0)
    return command.extras


# --- values by themselves ---------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.5}, "min_p=1.5 must lie between 0 and 1"),
    ({"min_p": math.nan}, "min_p=nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must lie between 1e-06 and 1e+06"),
    ({"repetition_penalty": -1}, "repetition_penalty=-1"),
    ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5 must lie between -2 and 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty='1' must be a number"),
    ({"logit_bias": [1, 2]}, "logit_bias=[1, 2]"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias has 'a'"),
    ({"logit_bias": {"-1": 1.0}}, "logit_bias has '-1'"),
    ({"logit_bias": {1: math.nan}}, "logit_bias has nan for token 1"),
    ({"logit_bias": {1: None}}, "logit_bias has None for token 1"),
    ({"logit_bias": {1: 2.0, "1": 3.0}}, "logit_bias has token 1 twice"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, f"the most is {MAX_LOGIT_BIASES}"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[] allows nothing"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids has 1.5"),
    ({"allowed_token_ids": 7}, "allowed_token_ids=7"),
    ({"bad_words": [""]}, "bad_words has ''"),
    ({"bad_words": ["  "]}, "bad_words has '  '"),
    ({"bad_words": [[]]}, "bad_words has []"),
    ({"bad_words": [1, 2]}, "bad_words has 1"),
    ({"bad_words": [["a"]]}, "bad_words has 'a'"),
    ({"stop_words": [""]}, "stop_words has ''"),
    ({"stop_words": ""}, "stop_words has ''"),
    ({"stop_words": [b"x"]}, "stop_words has b'x'"),
    ({"stop_words": 3}, "stop_words=3"),
    ({"stop_token_ids": [-1]}, "stop_token_ids has -1"),
    ({"min_tokens": -1}, "min_tokens=-1 must be an integer of at least 0"),
    ({"min_tokens": 31}, "min_tokens=31 exceeds num_tokens_to_generate=30"),
    ({"min_tokens": 5, "num_tokens_total": 4}, "min_tokens=5 exceeds num_tokens_total=4"),
    ({"top_n_logprobs": 21}, "top_n_logprobs=21 must be at most 20"),
    ({"log_probs_mode": "logits"}, "log_probs_mode='logits' must be 'raw' or 'processed'"),
    ({"n": 0}, "n=0 must be an integer of at least 1"),
    ({"n": True}, "n=True"),
    ({"n": MAX_SEQUENCES + 1}, f"must be at most {MAX_SEQUENCES}"),
    ({"n": 3, "best_of": 2}, "best_of=2 must be at least n=3"),
    ({"ignore_eos": "no"}, "ignore_eos='no' must be True or False"),
    ({"return_segments": True}, "return_segments=True is not supported"),
    ({"logits_processors": [3]}, "logits_processors has 3"),
    ({"structured_outputs": 3}, "structured_outputs=3"),
    ({"structured_outputs": {"json": object}}, "structured_outputs="),
    ({"structured_outputs": {}}, "structured_outputs={}"),
    ({"top_k": 10**5000}, "top_k=a number of too many digits must be at most"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_a_wrong_value_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**values).checked()
    assert said in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_large_wrong_value_is_shown_in_part() -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids has 'x{50,}\.\.\.; every id") as error:
        SamplingParams(stop_token_ids=["x" * 10**6]).checked()  # type: ignore[list-item]
    assert len(str(error.value)) < 400


def test_checked_values_are_of_own_types() -> None:
    biases, ids, words = {"5": np.float32(1.5), np.int64(6): 200}, [np.int32(4), 4, 3], ["a", [7]]
    params = SamplingParams(
        top_k=np.int64(3),  # type: ignore[arg-type]
        min_p=np.float64(0.5),
        logit_bias=biases,  # type: ignore[arg-type]
        allowed_token_ids=ids,  # type: ignore[arg-type]
        bad_words=words,  # type: ignore[arg-type]
        stop_words="end",
        stop_token_ids={9},  # type: ignore[arg-type]
        logits_processors=[no_change],
    )
    own = params.checked()
    assert own.logit_bias == {5: 1.5, 6: 100.0}
    assert own.allowed_token_ids == (4, 3)
    assert own.bad_words == ("a", (7,)) and own.stop_words == ("end",)
    assert own.stop_token_ids == (9,) and own.logits_processors == (no_change,)
    assert {type(own.top_k), *map(type, own.logit_bias)} == {int}
    assert {type(own.min_p), *map(type, own.logit_bias.values())} == {float}
    biases.clear(), ids.clear(), words.clear()  # type: ignore[func-returns-value]
    assert own.checked() == own and own.logit_bias and own.allowed_token_ids and own.bad_words
    assert params.stop_words == "end"  # the user's own stay as they are


def test_none_is_the_default_where_vllm_takes_it() -> None:
    names = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "n", "best_of", "stop_words", "stop_token_ids", "bad_words"),
        *("logit_bias", "allowed_token_ids", "structured_outputs", "min_tokens", "seed"),
    )
    assert SamplingParams(**dict.fromkeys(names)).checked() == SamplingParams().checked()


def test_a_bias_that_is_too_large_is_cut_as_in_vllm() -> None:
    params = SamplingParams(logit_bias={1: -math.inf, 2: 10**400, 3: -99.5}).checked()
    assert params.logit_bias == {1: -100.0, 2: 100.0, 3: -99.5}


def test_what_is_wanted_follows_from_several_values() -> None:
    plain = SamplingParams()
    assert not plain.wants_log_probs and not plain.wants_prompt_log_probs
    top = SamplingParams(top_n_logprobs=3)
    assert top.wants_log_probs and top.wants_prompt_log_probs
    generated = SamplingParams(return_log_probs=True, skip_prompt_log_probs=True)
    assert generated.wants_log_probs and not generated.wants_prompt_log_probs
    assert [SamplingParams(n=2).num_sequences, SamplingParams(best_of=4).num_sequences] == [2, 4]


# --- JSON -------------------------------------------------------------------------------------


def through_json(params: SamplingParams) -> SamplingParams:
    return SamplingParams.deserialize(json.loads(json.dumps(params.serialize())))


def test_checked_parameters_come_back_from_json_as_they_were() -> None:
    params = SamplingParams(
        logit_bias={5: 1.5},
        allowed_token_ids=[1, 2],
        bad_words=["a", [3, 4]],
        stop_words=["x", "y"],
        stop_token_ids=(1, 2),
        n=2,
        best_of=3,
        structured_outputs={"json": {"enum": [1, 2]}},
    ).checked()
    assert through_json(params) == params
    command, _ = validator(Letters("a")).add(
        3, 4, [1], dataclasses.replace(params, structured_outputs=None), 0
    )
    assert commands.from_json(json.loads(json.dumps(commands.to_json(command)))) == command


def test_functions_do_not_come_back_from_json_and_the_error_says_so() -> None:
    recorded = through_json(SamplingParams(logits_processors=[no_change]).checked())
    with pytest.raises(RequestError, match=r"no_change', the name of a function.*replayed"):
        recorded.checked()


# --- checked once, and carried as they are ----------------------------------------------------

ASKED = SamplingParams(
    temperature=0.5,
    num_tokens_to_generate=None,
    num_tokens_total=50,
    logit_bias={5: 1.5, 3: -1.0},
    allowed_token_ids=[1, 2, 3],
    bad_words=["a", [3, 4]],
    stop_words="x",
    stop_token_ids=(1, 2),
    n=2,
    structured_outputs={"json": {"enum": [1, 2.0, None]}},
)


def test_checked_parameters_are_plain_frozen_and_give_the_parameters_back() -> None:
    own = ASKED.checked()
    checked = CheckedParams.of(own)
    assert own_types(checked.given) and hash(checked)
    with pytest.raises(dataclasses.FrozenInstanceError):
        checked.given = ()  # type: ignore[misc]
    assert checked.params() == own
    assert all(checked[name] == getattr(own, name) for name in FIELDS)
    assert CheckedParams.of(SamplingParams().checked()).given == ()


def test_checked_parameters_pass_msgpack_and_json_as_they_are() -> None:
    checked = CheckedParams.of(ASKED.checked())
    packed = msgspec.msgpack.encode(checked)
    assert msgspec.msgpack.decode(packed, type=CheckedParams) == checked
    text = json.dumps(checked.serialize())
    assert CheckedParams.deserialize(json.loads(text)) == checked
    assert json.loads(text).items() <= ASKED.checked().serialize().items()


def test_a_default_needs_no_check() -> None:
    """Defaults are of their own types, and what a check returns for them."""
    for name in FIELDS:
        default = getattr(SamplingParams(), name)
        check = sampling_params._CHECKS[name]
        assert check(name, default) == default, name
        assert type(check(name, default)) is type(default), name


def test_parameters_are_checked_once_from_the_body_to_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = []
    check = SamplingParams.checked
    monkeypatch.setattr(SamplingParams, "checked", lambda own: checks.append(own) or check(own))
    body = CompletionRequest.model_validate({"prompt": "a", "top_p": 0.5, "stop": "b", "seed": 3})
    params = body.params(8)
    message = Generate(0, [1], CheckedParams.of(params))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Generate)
    command, own = validator(Letters("ab")).add(0, 0, [1], arrived.params, 0)
    assert len(checks) == 1
    assert command.params is arrived.params == message.params
    assert own == params


# --- fuzzing ----------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.fractions()
    | st.decimals()
    | st.sampled_from(
        [np.int64(3), np.float32(0.5), np.bool_(True), np.arange(2), object(), object]
    )
    | st.sampled_from(["raw", "processed", {1}, frozenset({2}), range(3)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.floats(), inner, max_size=3)
    ),
    max_leaves=6,
)
PLAUSIBLE = st.one_of(
    st.integers(-2, 40),
    st.integers(40, 400),
    st.floats(-3, 3),
    st.lists(st.integers(0, 2**31), max_size=4),
    st.lists(st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=3), max_size=3),
    st.dictionaries(st.integers(0, 9) | st.integers(0, 9).map(str), st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
)


def is_named(name: str, error: RequestError) -> bool:
    """The error says which parameter it is about, and not only by a word that happens to be one."""
    return re.search(rf"(?<!\w){name}(=|\.| has | allows | bans | holds )", str(error)) is not None


def own_types(value: Any) -> bool:
    """Nothing but Python's own immutable types, and dictionaries of JSON."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(own_types, value))
    return value is None or type(value) in (bool, int, float, str, dict)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), PLAUSIBLE | JUNK, min_size=1, max_size=3))
def test_any_value_is_accepted_for_good_or_refused_by_its_name(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    try:
        own = params.checked()
    except RequestError as error:
        assert any(is_named(name, error) for name in values)
        assert "\n" not in str(error)
        return
    assert own.checked() == own
    if own.logits_processors is None:
        assert all(own_types(getattr(own, name)) for name in FIELDS)
        assert CheckedParams.of(own).params() == own
        assert through_json(own) == own


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FIELDS), PLAUSIBLE | JUNK)
def test_the_door_refuses_what_it_cannot_serve_by_name(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    try:
        command, own = validator(Letters()).add(0, 0, [1, 2], params, 0)
    except RequestError as error:
        assert is_named(name, error)
        return
    assert isinstance(own, SamplingParams)
    assert json.loads(json.dumps(commands.to_json(command)))["command"] == "AddRequest"
    if command.extras is not None:
        extras = command.extras
        assert extras != Extras()
        tokens = [*extras.banned, *(extras.allowed or ()), *(token for token, _ in extras.bias)]
        assert all(0 <= token < VOCABULARY for token in tokens)


# --- what S is asked --------------------------------------------------------------------------

ASKS_NOTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3},
    {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": -0.0, "min_p": 0},
    {"min_tokens": 5, "termination_id": -1},
    {"logit_bias": {3: 0.0}},
    {"logit_bias": {}},
    {"bad_words": []},
    {"allowed_token_ids": range(VOCABULARY)},
    {"stop_token_ids": range(20)},
    {"skip_prompt_log_probs": True, "log_probs_mode": "processed"},
    {"n": 4},
]


@pytest.mark.parametrize("values", ASKS_NOTHING)
def test_a_request_that_changes_nothing_is_plain(values: dict[str, Any]) -> None:
    assert extras_of(**values) is None


ASKS: list[tuple[dict[str, Any], Mapping[str, Any]]] = [
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"presence_penalty": -1}, {"presence_penalty": -1.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"logit_bias": {7: 1, "3": -1, 4: 0}}, {"bias": ((3, -1.0), (7, 1.0))}),
    ({"allowed_token_ids": [9, 2, 9]}, {"allowed": (2, 9)}),
    ({"bad_words": [[5], [6, 7], [5]]}, {"banned": (5,), "bad_words": ((6, 7),)}),
    ({"min_tokens": 4, "stop_token_ids": [8, 7]}, {"min_total": 7, "stop_ids": (7, 8)}),
    ({"return_log_probs": True}, {"log_probs": RAW_LOG_PROBS}),
    ({"top_n_logprobs": 1, "log_probs_mode": "processed"}, {"log_probs": PROCESSED_LOG_PROBS}),
]


@pytest.mark.parametrize(("values", "expected"), ASKS)
def test_what_is_asked_reaches_s(values: dict[str, Any], expected: Mapping[str, Any]) -> None:
    assert extras_of(**values) == Extras(**expected)


def test_prompt_log_probs_are_asked_for_unless_they_are_skipped() -> None:
    for values, wanted in (({}, True), ({"skip_prompt_log_probs": True}, False)):
        params = SamplingParams(return_log_probs=True, **values)
        command, _ = validator().add(0, 0, [1, 2], params, 0)
        assert command.prompt_log_probs is wanted
    assert not validator().add(0, 0, [1, 2], None, 0)[0].prompt_log_probs


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ({}, (EOD,)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [EOD, 5]}, (EOD, 5)),
        ({"ignore_eos": True, "termination_id": EOD}, ()),
        ({"ignore_eos": True, "termination_id": 7}, (7,)),
        ({"termination_id": -1, "stop_token_ids": [3, 3]}, (3,)),
        ({"stop_token_ids": range(10, 22)}, (EOD, *range(10, 22))),
    ],
)
def test_which_tokens_end_a_request(values: dict[str, Any], stops: tuple[int, ...]) -> None:
    command, _ = validator(Letters()).add(0, 0, [1], SamplingParams(**values), 0)
    assert command.stop_ids == stops


def test_the_engines_end_tokens_are_the_models_own() -> None:
    door = validator(Letters(), eos_token_ids=(4, 5))
    assert door.add(0, 0, [1], SamplingParams(), 0)[0].stop_ids == (4, 5)
    assert door.add(0, 0, [1], SamplingParams(ignore_eos=True), 0)[0].stop_ids == ()


def test_bad_words_are_tokenised_as_in_vllm() -> None:
    # "cat" and " cat" are tokens of their own; "dog" behind a space begins with the space's token.
    extras = extras_of(Letters("cat", " cat"), bad_words=["cat", " dog"])
    assert extras == Extras(banned=(EOD + 1, EOD + 2), bad_words=((*b"dog",),))


OUT_OF_REACH: list[tuple[dict[str, Any], str]] = [
    (
        {"logit_bias": {VOCABULARY: 1.0}},
        "logit_bias has token id 300; the model's ids are 0 .. 299",
    ),
    ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids has token id 300"),
    ({"bad_words": [[VOCABULARY]]}, "bad_words has token id 300"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids has token id 300"),
    ({"termination_id": VOCABULARY}, "termination_id has token id 300"),
    ({"bad_words": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}, "17 tokens; the most is 16"),
    ({"bad_words": [[1, n] for n in range(MAX_BAD_WORDS + 1)]}, "257 token sequences; the most"),
    ({"bad_words": [[5], [6]], "allowed_token_ids": [5, 6]}, "allowed_token_ids allows 2"),
    ({"min_tokens": 1, "stop_token_ids": [5], "allowed_token_ids": [5]}, "min_tokens holds back 1"),
    ({"bad_words": [[n] for n in range(VOCABULARY)]}, "bad_words bans 300"),
    ({"min_tokens": 63, "num_tokens_to_generate": None}, "min_tokens=63 exceeds the 61 tokens"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs needs a tokenizer"),
    ({"stop_words": ["x"]}, "stop_words has texts, and the model has no tokenizer"),
    ({"bad_words": [[1], "x"]}, "bad_words has texts, and the model has no tokenizer"),
]


@pytest.mark.parametrize(("values", "said"), OUT_OF_REACH)
def test_what_the_model_cannot_serve_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        extras_of(**values)
    assert said in str(error.value)


def test_a_bad_word_that_makes_no_token_is_refused() -> None:
    class Silent(Letters):
        def tokenize(self, text: str) -> list[int]:
            return []

    with pytest.raises(RequestError, match="bad_words has 'x', of which the tokenizer makes"):
        extras_of(Silent(), bad_words=["x"])


def test_a_greedy_request_keeps_its_min_p_for_when_it_is_sampled() -> None:
    door, greedy = validator(), SamplingParams(temperature=0.0, min_p=0.5, num_tokens_to_generate=9)
    command, params = door.add(0, 0, [1], greedy, 0)
    assert command.extras is not None and command.extras.min_p == 0.5
    assert door.update(0, params, {"temperature": 1.0}).changes == {"temperature": 1.0}
