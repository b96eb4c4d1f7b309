"""Commits to records: text up to stop words, reasons, log-probabilities, rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.engine.requests.output_processor import OutputProcessor, TokenOutput
from megatron_async.errors import IntegrityError, RequestError
from megatron_async.request.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    Status,
    StepReport,
    TokenLogProbs,
    WeightSpan,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.events import Change, Commit, Event
from megatron_async.step.extras import MAX_TOP_LOG_PROBS, PROMPT_LOG_PROB_WORDS

EOD, FAILING = 900, 666
KEY, ID = 5, 50


class Letters:
    """Tokens are code points; ``FAILING`` is an error. ``EOD`` is visible, unlike most."""

    eod = EOD

    def detokenize(self, ids: Sequence[int]) -> str:
        if FAILING in ids:
            raise KeyError(FAILING)
        return "".join(map(chr, ids))


class LetterStream:
    """Holds 'á' back until another token comes."""

    def __init__(self, tokenizer: Letters) -> None:
        self.tokenizer, self.held = tokenizer, ""

    def push(self, token: int) -> str:
        text = self.held + self.tokenizer.detokenize([token])
        self.held = "á" if text.endswith("á") else ""
        return text.removesuffix("á")

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


class StreamedLetters(Letters):
    def stream(self) -> LetterStream:
        return LetterStream(self)


TOKENIZERS = [Letters, StreamedLetters]


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Run:
    """One request, whose rows the test brings as scheduler and loop would."""

    def __init__(
        self, tokenizer: Any, stop_ids: tuple[int, ...] | None = None, **params: Any
    ) -> None:
        self.outputs = OutputProcessor(tokenizer, track_pauses=False, eos_token_ids=(EOD,))
        self.request = DynamicInferenceRequest(
            request_id=ID, prompt_tokens=[1, 2, 3], sampling_params=SamplingParams(**params)
        )
        if stop_ids is None:
            stop_ids = (EOD, *params.get("stop_token_ids", ()))
        self.future = self.outputs.open(KEY, self.request, stop_ids)
        self.outputs.record_events([Event(KEY, Change.ADMIT)])
        self.tickets = itertools.count()
        self.shown: list[TokenOutput] = []

    def commit(
        self, tokens: Sequence[int], reason: FinishReason | None = None, **more: Any
    ) -> list[TokenOutput]:
        """Commit a row, which the watchers may end before its last token."""
        tokens = tuple(tokens)
        keep = self.outputs.ends.keep(KEY, tokens) if self.outputs.ends.watches(KEY) else None
        if keep is not None:
            tokens, reason = tokens[:keep], FinishReason.STOP
        reasons = {} if reason is None else {KEY: reason}
        report = StepReport(next(self.tickets), 1, True, None, len(tokens), 0)
        self.outputs.commit(Commit((KEY,), (tokens,), reasons, set(), **more), report)
        new = self.outputs.take().outputs
        self.shown += new
        return new

    def texts(self) -> list[str | None]:
        return [output.text for output in self.shown]


# --- stop words -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_stop_word_ends_the_request_and_is_cut(tokenizer: Any) -> None:
    run = Run(tokenizer(), stop_words=["xyz", "END"])
    run.commit(ids("abE"))
    run.commit(ids("N"))
    run.commit(ids("Dmore"))
    request = run.request
    assert request.generated_tokens == list(ids("abEND"))
    assert (request.generated_text, request.stop_reason) == ("ab", "END")
    assert request.finish_reason is FinishReason.STOP and request.status is Status.COMPLETED
    assert run.texts() == ["a", "b", "", "", ""]
    assert [output.finish_reason for output in run.shown] == [None] * 4 + [FinishReason.STOP]
    assert request.counters.committed == 5


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_stop_word_stays_when_it_is_asked_for(tokenizer: Any) -> None:
    run = Run(tokenizer(), stop_words=["END"], include_stop_str_in_output=True)
    run.commit(ids("abENDmore"))
    assert (run.request.generated_text, run.request.stop_reason) == ("abEND", "END")
    assert run.texts() == ["a", "b", "", "", "END"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("words", [(), ("END",), ("DX", "X")])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_text_when_it_is_asked_for(
    tokenizer: Any, words: tuple[str, ...], include: bool
) -> None:
    """As vLLM's does; it is in no stop word that is looked for."""
    (stop,) = ids("X")
    run = Run(
        tokenizer(), stop_token_ids=[stop], stop_words=words, include_stop_str_in_output=include
    )
    run.commit(ids("abEN"))
    run.commit(ids("X"), FinishReason.STOP)
    assert run.request.generated_text == "abENX"[: 5 if include else 4]
    streamed = [text for text in run.texts() if text is not None]
    assert not streamed or "".join(streamed) == run.request.generated_text
    assert run.request.stop_reason == stop and run.request.generated_tokens[-1] == stop


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ERROR])
def test_another_end_releases_what_was_held_back(tokenizer: Any, reason: FinishReason) -> None:
    run = Run(tokenizer(), stop_words=["END"])
    run.commit(ids("abE"))
    run.commit(ids("N"), reason)
    assert run.texts() == ["a", "b", "", "EN"]
    assert (run.request.generated_text, run.request.stop_reason) == ("abEN", None)
    assert run.request.finish_reason is reason


def test_an_abort_releases_what_was_held_back() -> None:
    run = Run(StreamedLetters(), stop_words=["END"])
    run.commit(ids("abE"))
    run.outputs.abort(KEY)
    (last,) = run.outputs.take().outputs
    assert last == TokenOutput(ID, None, "E", FinishReason.ABORT)
    assert (run.request.generated_text, run.request.stop_reason) == ("abE", None)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("row", ["E!", "E!D", "END"])
def test_the_first_end_in_a_row_counts(tokenizer: Any, row: str) -> None:
    """``!`` is a stop token, whose text is not shown and does not complete a word."""
    run = Run(tokenizer(), stop_words=["END", "E!"], stop_token_ids=(ord("!"),))
    run.commit(ids(row))
    by_word = row == "END"
    assert run.request.generated_tokens == list(ids(row[:3] if by_word else "E!"))
    assert run.request.generated_text == ("" if by_word else "E")
    assert run.request.stop_reason == ("END" if by_word else ord("!"))
    assert "".join(map(str, run.texts())) == run.request.generated_text


def test_keep_may_be_asked_without_the_stop_token() -> None:
    run = Run(StreamedLetters(), stop_words=["END"], stop_token_ids=(ord("!"),))
    assert run.outputs.ends.keep(KEY, ids("aE")) is None
    report = StepReport(0, 1, True, None, 3, 0)
    commit = Commit((KEY,), (ids("aE!"),), {KEY: FinishReason.STOP}, set())
    run.outputs.commit(commit, report)
    assert [output.text for output in run.outputs.take().outputs] == ["a", "", "E"]
    assert (run.request.generated_text, run.request.stop_reason) == ("aE", ord("!"))


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_word_that_only_the_end_completes_is_the_reason(reason: FinishReason) -> None:
    """The stream holds its last character back, which may still change."""
    run = Run(StreamedLetters(), stop_words=["á"], stop_token_ids=(ord("!"),))
    run.commit(ids("xá") + ids("!") * (reason is FinishReason.STOP), reason)
    assert run.request.finish_reason is FinishReason.STOP
    assert run.shown[-1].finish_reason is FinishReason.STOP
    assert (run.request.generated_text, run.request.stop_reason) == ("x", "á")
    assert "á" not in "".join(map(str, run.texts()))


def test_a_word_that_an_abort_completes_is_cut_and_no_reason() -> None:
    run = Run(StreamedLetters(), stop_words=["á"])
    run.commit(ids("xá"))
    run.outputs.abort(KEY)
    assert run.request.finish_reason is FinishReason.ABORT
    assert (run.request.generated_text, run.request.stop_reason) == ("x", None)


def test_stop_words_count_behind_min_tokens() -> None:
    run = Run(StreamedLetters(), stop_words=["ab"], min_tokens=2)
    run.commit(ids("abab"))
    assert run.request.generated_tokens == list(ids("abab"))
    assert run.request.generated_text == "ab"


def test_plain_requests_are_not_watched() -> None:
    for tokenizer in (StreamedLetters(), None):
        assert not Run(tokenizer).outputs.ends.watches(KEY)
    run = Run(None, stop_words=["a"])  # refused at the door; here it does no harm
    assert not run.outputs.ends.watches(KEY)
    run.commit(ids("ab"), FinishReason.LENGTH)
    assert run.texts() == [None, None] and run.request.generated_text is None


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_tokenizer_that_fails_costs_the_text_and_the_stop_words(tokenizer: Any) -> None:
    run = Run(tokenizer(), stop_words=["cd"])
    run.commit((*ids("ac"), FAILING))
    run.commit(ids("cd"), FinishReason.LENGTH)
    assert run.texts() == ["a", "", None, None, None]
    request = run.request
    assert request.generated_text is None and request.stop_reason is None
    assert request.finish_reason is FinishReason.LENGTH
    errors = [e for e in request.events if e.type is DynamicInferenceEventType.ERROR_NONTRANSIENT]
    assert len(errors) == 1


class Never:
    def take(self, token: int) -> bool:
        return False


class EndsWith:
    """Ends with a token, as a grammar does."""

    def __init__(self, token: int) -> None:
        self.token = token

    def take(self, token: int) -> bool:
        return token == self.token


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("words", [None, ["END"]])
def test_the_token_that_another_watcher_ends_with_is_text(tokenizer: Any, words: Any) -> None:
    run = Run(tokenizer(), stop_words=words)
    run.outputs.ends.watch(KEY, EndsWith(ord("}")))
    run.commit(ids("{E}x"))
    assert run.request.generated_tokens == list(ids("{E}"))
    assert (run.request.generated_text, run.request.stop_reason) == ("{E}", None)
    assert run.request.finish_reason is FinishReason.STOP
    if words or tokenizer is StreamedLetters:
        assert "".join(map(str, run.texts())) == "{E}"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_stop_token_is_no_text_to_a_watched_request_either(tokenizer: Any) -> None:
    run = Run(tokenizer())
    run.outputs.ends.watch(KEY, Never())
    run.commit((*ids("ab"), EOD), FinishReason.STOP)
    assert (run.request.generated_text, run.request.stop_reason) == ("ab", None)


@pytest.mark.parametrize(
    ("params", "stop_ids", "token", "shown"),
    [
        ({}, (EOD,), EOD, ""),
        ({"ignore_eos": True}, (), EOD, chr(EOD)),
        ({"termination_id": -1}, (), EOD, chr(EOD)),
        ({"termination_id": ord("t")}, ids("t"), EOD, chr(EOD)),
        ({"termination_id": ord("t")}, ids("t"), ord("t"), ""),
        ({"stop_token_ids": ids("t")}, (EOD, *ids("t")), ord("t"), ""),
        ({"stop_token_ids": ids("t")}, (EOD, *ids("t")), EOD, ""),
        ({"ignore_eos": True, "stop_token_ids": (EOD,)}, (EOD,), EOD, ""),
    ],
)
@pytest.mark.parametrize("words", [None, ["END"]])
def test_only_stop_tokens_of_the_request_have_no_text(
    words: Any, params: dict[str, Any], stop_ids: tuple[int, ...], token: int, shown: str
) -> None:
    """To a request that something else ends, too: a grammar ends with any token."""
    run = Run(StreamedLetters(), stop_ids, stop_words=words, **params)
    run.outputs.ends.watch(KEY, EndsWith(token))
    run.commit((ord("a"), token))
    assert run.request.generated_text == "a" + shown
    assert run.request.finish_reason is FinishReason.STOP


def test_watchers_go_with_their_request() -> None:
    run = Run(StreamedLetters(), stop_words=["a"])
    assert run.outputs.ends.watches(KEY)
    run.outputs.close([KEY])
    assert not run.outputs.ends.watches(KEY)
    run = Run(StreamedLetters(), stop_words=["a"])
    run.outputs.drop(KEY, ID)
    assert not run.outputs.ends.watches(KEY)
    run = Run(StreamedLetters())
    twin = DynamicInferenceRequest(
        request_id=ID, sampling_params=SamplingParams(stop_words=["a"], return_log_probs=True)
    )
    assert run.outputs.open(KEY + 1, twin, ()) is None
    assert not run.outputs.ends.watches(KEY + 1)


text_of = st.text("abE!", max_size=12)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(
    text=text_of,
    cuts=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    words=st.lists(st.text("abE", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_rows_of_any_width_give_the_same_request(
    tokenizer: Any, text: str, cuts: list[int], words: list[str], min_tokens: int
) -> None:
    """What one token a row gives, whose text is the plain search's."""

    def run_of(widths: list[int]) -> Run:
        run = Run(tokenizer(), stop_words=words, min_tokens=min_tokens)
        at = 0
        for width in itertools.cycle(widths):
            row = text[at : at + width]
            if not row or run.request.finish_reason is not None:
                break
            at += width
            run.commit(ids(row), FinishReason.LENGTH if at >= len(text) else None)
        return run

    one, wide = run_of([1]), run_of(cuts)
    ends = [
        (end, words.index(word), word)
        for end in range(min_tokens + 1, len(text) + 1)
        for word in words
        if text[:end].endswith(word)
    ]
    end, _, word = min(ends, default=(len(text), 0, None))
    for run in (one, wide):
        assert run.request.generated_tokens == list(ids(text[:end]))
        if text:
            assert run.request.stop_reason == word
            assert run.request.generated_text == text[: end - len(word or "")]
        assert "".join(map(str, run.texts())) == (run.request.generated_text or "")
    assert one.texts() == wide.texts()


# --- the reason of a stop token ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({}, EOD, None),
        ({"stop_token_ids": (7,)}, 7, 7),
        ({"stop_token_ids": (7,)}, EOD, None),
        ({"stop_token_ids": (EOD,)}, EOD, None),
        ({"termination_id": 7}, 7, 7),
        ({"termination_id": EOD}, EOD, None),
        ({"ignore_eos": True, "stop_token_ids": (EOD,)}, EOD, EOD),
        ({"termination_id": -1, "stop_token_ids": (EOD,)}, EOD, EOD),
    ],
)
def test_the_models_own_end_token_is_no_stop_reason(
    params: dict[str, Any], token: int, reason: int | None
) -> None:
    run = Run(StreamedLetters(), **params)
    run.commit((65, token), FinishReason.STOP)
    assert run.request.stop_reason == reason
    assert run.request.generated_text == "A"


def test_only_the_models_own_end_tokens_are_no_stop_reason() -> None:
    run = Run(StreamedLetters())
    run.outputs = OutputProcessor(StreamedLetters(), track_pauses=False, eos_token_ids=(7, 8))
    for key, token in enumerate((7, 8, EOD)):
        request = DynamicInferenceRequest(request_id=key)
        run.outputs.open(key, request, (7, 8))
        run.outputs.record_events([Event(key, Change.ADMIT)])
        commit = Commit((key,), ((token,),), {key: FinishReason.STOP}, set())
        run.outputs.commit(commit, StepReport(key, 1, True, None, 1, 0))
        assert request.stop_reason == (EOD if token == EOD else None)


def test_other_ends_have_no_stop_reason() -> None:
    run = Run(StreamedLetters(), stop_token_ids=(7,))
    run.commit((7,), FinishReason.LENGTH)
    assert run.request.stop_reason is None and run.request.generated_text == "\x07"


# --- log-probabilities ------------------------------------------------------------------------


def words_of(*positions: tuple[float, dict[int, float]], integers: bool = True) -> Any:
    """Positions as a device packs them; what is left of a position's places is empty."""
    words = np.full((len(positions), PROMPT_LOG_PROB_WORDS), -1, dtype=np.int32)
    for row, (own, top) in zip(words, positions, strict=True):
        row[:1] = np.float32([own]).view(np.int32)
        row[1 : 1 + len(top)] = list(top)
        lps = np.float32([*top.values()])
        row[1 + MAX_TOP_LOG_PROBS : 1 + MAX_TOP_LOG_PROBS + len(top)] = lps.view(np.int32)
    return words if integers else words.view(np.float32)


FIRST = (-0.5, {4: -0.25, 9: -1.5, 2: -2.0})
SECOND = (-3.0, {9: -0.125, 4: -2.5, 7: -4.0})
THIRD = (-0.75, {1: -0.75, 0: -1.0, 3: float("-inf")})


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("rows", [(1, 1, 1), (3,), (2, 1)])
def test_log_probs_of_generated_tokens_arrive_with_them(
    integers: bool, rows: tuple[int, ...]
) -> None:
    run = Run(StreamedLetters(), return_log_probs=True, top_n_logprobs=2)
    every, at = (FIRST, SECOND, THIRD), 0
    for width in rows:
        window = [*every[at : at + width], *[(9.0, {})] * (3 - width)]  # behind the count: garbage
        run.commit(
            range(65 + at, 65 + at + width), log_probs=[words_of(*window, integers=integers)]
        )
        at += width
    tops = [{4: -0.25, 9: -1.5}, {9: -0.125, 4: -2.5}, {1: -0.75, 0: -1.0}]
    assert run.request.generated_log_probs == [-0.5, -3.0, -0.75]
    assert run.request.generated_top_n_logprobs == tops
    assert [list(top) for top in run.request.generated_top_n_logprobs] == [[4, 9], [9, 4], [1, 0]]
    assert [output.log_probs for output in run.shown] == [
        TokenLogProbs(own, top) for own, top in zip([-0.5, -3.0, -0.75], tops, strict=True)
    ]
    assert run.texts() == ["A", "B", "C"]


def test_places_without_a_token_are_left_out_and_impossible_tokens_are_not() -> None:
    run = Run(None, top_n_logprobs=20)
    run.commit((1,), log_probs=[words_of(THIRD)])
    assert run.request.generated_top_n_logprobs == [{1: -0.75, 0: -1.0, 3: float("-inf")}]
    assert run.request.generated_log_probs == [-0.75]


def test_log_probs_are_for_those_who_asked() -> None:
    outputs = OutputProcessor(None, track_pauses=False)
    asks = [{}, {"return_log_probs": True, "skip_prompt_log_probs": True}, {"top_n_logprobs": 1}]
    requests = []
    for key, ask in enumerate(asks):
        params = SamplingParams(**ask)
        requests.append(DynamicInferenceRequest(request_id=key, sampling_params=params))
        outputs.open(key, requests[-1], ())
        outputs.record_events([Event(key, Change.ADMIT)])
    # All rows at once, as one array: those who have not asked have words, too.
    words = np.stack([words_of(FIRST), words_of(FIRST), words_of(SECOND)])
    commit = Commit((0, 1, 2), ((1,), (2,), (3,)), {}, set(), words, None)
    outputs.commit(commit, StepReport(0, 1, True, None, 3, 0))
    plain, own, top = requests
    assert plain.generated_log_probs is plain.generated_top_n_logprobs is None
    assert plain.prompt_log_probs is plain.prompt_top_n_logprobs is None
    assert own.generated_log_probs == [-0.5] and own.generated_top_n_logprobs is None
    assert own.prompt_log_probs is own.prompt_top_n_logprobs is None
    assert top.generated_log_probs == [-3.0]
    assert top.generated_top_n_logprobs == [{9: -0.125}]
    assert top.prompt_log_probs == [] and top.prompt_top_n_logprobs == []
    of_tokens = [output.log_probs for output in outputs.take().outputs]
    assert of_tokens == [None, TokenLogProbs(-0.5, {}), TokenLogProbs(-3.0, {9: -0.125})]


def test_tokens_behind_a_stop_word_leave_no_log_probs() -> None:
    run = Run(StreamedLetters(), stop_words=["b"], return_log_probs=True)
    run.commit(ids("abc"), log_probs=[words_of(FIRST, SECOND, THIRD)])
    assert run.request.generated_log_probs == [-0.5, -3.0]
    assert run.request.generated_top_n_logprobs is None


def test_rows_without_a_token_bring_no_log_probs() -> None:
    """A failed row, and one of a request that has ended."""
    run = Run(None, return_log_probs=True)
    run.commit((), FinishReason.ERROR, log_probs=[words_of(FIRST)])
    assert run.request.generated_log_probs == [] and run.shown[-1].log_probs is None
    commit = Commit((KEY,), ((),), {}, {KEY}, [words_of(FIRST)])
    run.outputs.commit(commit, StepReport(1, 1, True, None, 0, 1))
    assert run.request.generated_log_probs == []


def test_log_probs_of_the_prompt_come_in_order_and_once() -> None:
    """The prompt has three tokens; that it is computed again, and further, changes nothing."""
    run = Run(None, return_log_probs=True, top_n_logprobs=1)

    def bring(first: int, *positions: Any) -> None:
        run.commit((), FinishReason.ERROR, prompt_log_probs={KEY: (first, words_of(*positions))})
        run.request.finish_reason = None  # it brought no token, which is all that matters here
        run.outputs.keys[ID] = KEY

    bring(1, FIRST)
    assert run.request.prompt_log_probs == [-0.5]
    bring(1, SECOND, SECOND, THIRD)
    assert run.request.prompt_log_probs == [-0.5, -3.0]
    assert run.request.prompt_top_n_logprobs == [{4: -0.25}, {9: -0.125}]
    for first in (1, 2, 3):
        bring(first, THIRD)
    assert run.request.prompt_log_probs == [-0.5, -3.0]
    assert run.request.generated_log_probs == []


def test_log_probs_of_the_prompt_come_before_the_first_token() -> None:
    """A request may end with it, and then is its user's."""
    run = Run(None, return_log_probs=True)
    seen: list[Any] = []
    run.outputs.on_finish = lambda request: seen.append(list(request.prompt_log_probs or ()))
    more = {"log_probs": [words_of(THIRD)], "prompt_log_probs": {KEY: (1, words_of(FIRST, SECOND))}}
    run.commit((7,), FinishReason.LENGTH, **more)
    assert seen == [[-0.5, -3.0]]
    assert run.request.prompt_top_n_logprobs is None


def test_log_probs_of_a_prompt_that_nobody_waits_for_are_dropped() -> None:
    run = Run(None, return_log_probs=True)
    run.outputs.abort(KEY)
    commit = Commit((), (), {}, set(), None, {KEY: (1, words_of(FIRST)), 99: (1, words_of(FIRST))})
    run.outputs.commit(commit, StepReport(0, 1, True, None, 0, 0))
    assert run.request.prompt_log_probs == []


def test_a_gap_in_the_prompts_log_probs_is_an_error() -> None:
    run = Run(None, return_log_probs=True)
    with pytest.raises(IntegrityError, match="position 2 have come before those of 1"):
        run.commit((), prompt_log_probs={KEY: (2, words_of(FIRST))})


# --- rollouts ---------------------------------------------------------------------------------


def test_a_rollout_has_all_that_training_needs() -> None:
    run = Run(None, return_log_probs=True, log_probs_mode="processed")
    run.request.seed = 11
    run.commit((7,), log_probs=[words_of(FIRST)])
    run.outputs.weight_version = 3
    run.commit((8, 9), FinishReason.LENGTH, log_probs=[words_of(SECOND, THIRD)])
    rollout = run.request.rollout()
    assert (rollout.prompt_tokens, rollout.generated_tokens) == ((1, 2, 3), (7, 8, 9))
    assert (rollout.log_probs, rollout.log_probs_mode) == ((-0.5, -3.0, -0.75), "processed")
    assert rollout.weight_spans == (WeightSpan(0, 0), WeightSpan(1, 3))
    assert (rollout.finish_reason, rollout.seed) == (FinishReason.LENGTH, 11)


def test_a_rollout_of_no_token_is_empty() -> None:
    run = Run(None, return_log_probs=True)
    run.outputs.abort(KEY)
    rollout = run.request.rollout()
    assert rollout.generated_tokens == rollout.log_probs == rollout.weight_spans == ()


def test_a_rollout_needs_log_probs_and_an_end() -> None:
    run = Run(None)
    with pytest.raises(RequestError, match="has not ended"):
        run.request.rollout()
    run.commit((7,), FinishReason.LENGTH)
    with pytest.raises(RequestError, match="return_log_probs=True"):
        run.request.rollout()


def test_a_rollout_that_does_not_add_up_is_an_error() -> None:
    run = Run(None, return_log_probs=True)
    run.commit((7, 8), FinishReason.LENGTH, log_probs=[words_of(FIRST, SECOND)])
    spans, log_probs = run.request.weight_spans, run.request.generated_log_probs
    for starts in ((), (1,), (0, 2), (0, 1, 0)):
        run.request.weight_spans = [WeightSpan(start, 0) for start in starts]
        with pytest.raises(IntegrityError, match="weight spans"):
            run.request.rollout()
    run.request.weight_spans, run.request.generated_log_probs = spans, log_probs[:1]
    with pytest.raises(IntegrityError, match="2 tokens have 1 log-probabilities"):
        run.request.rollout()
