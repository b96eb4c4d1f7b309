"""Rows that a grammar guides draft: with drafts that know it and err, with those of the grammar
itself, beside rows that nothing guides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_async.grammar.matcher import along
from megatron_async.grammar.windows import Window, WindowMasks
from megatron_async.request.request import FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine
from tests.support.guided_rows import (
    WINDOW,
    forced_stretches_come_as_drafts,
    guided_rows_draft_and_are_those_of_the_oracle,
    play,
)
from tests.support.hash_model import HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("depth", DEPTHS)
def test_guided_rows_draft_and_are_those_of_the_oracle(depth: int) -> None:
    guided_rows_draft_and_are_those_of_the_oracle(depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_forced_stretches_come_as_drafts(depth: int) -> None:
    forced_stretches_come_as_drafts(depth)


@pytest.mark.parametrize("micro_batches", (1, 2))
@pytest.mark.parametrize("depth", DEPTHS)
def test_grammars_alone_draft_and_open_windows_where_they_do(
    depth: int, micro_batches: int
) -> None:
    """Rows have windows where the host has guessed what follows, and no others have."""
    asks, requests, steps = play(
        depth, model=HashModel(), num_speculative_tokens=WINDOW - 1, speculative_method="grammar",
        pipeline_micro_batches=micro_batches,
    )  # fmt: skip
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask
        counts = request.counters
        if ask.regex is None or "x0y0" not in ask.regex:
            assert counts.drafted <= 3 * (ask.regex is not None), ask
        else:
            assert counts.accepted > 5 and counts.accepted > 0.6 * counts.drafted, counts
    assert steps[1] > steps[WINDOW] > 0 and sum(steps.values()) == steps[1] + steps[WINDOW]


# --- many at once -------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "required": ["ab", "c"], "additionalProperties": False,
    "properties": {
        "ab": {"type": "integer", "maximum": 99},
        "c": {"type": "array", "items": {"enum": [True, None, "abc", 12]}, "maxItems": 3},
    },
}  # fmt: skip


def texts_at_once(depth: int, count: int, **drafts: Any) -> list[Any]:
    """Texts of a schema by requests that differ in how many drafts their rows may have."""
    outputs = {"json": SCHEMA, "disable_any_whitespace": True}
    params = [
        SamplingParams(
            temperature=(0.0, 1.3)[number % 2], seed=number, num_tokens_to_generate=50,
            structured_outputs=outputs,
            num_speculative_tokens=(None, 0, 1, 2, 3)[number % 5] if drafts else None,
        )
        for number in range(count)
    ]  # fmt: skip
    sizes = {"max_requests": 16, "block_size_tokens": 4, "block_count": 300}
    with hash_engine(depth, tokenizer=hash_tokenizer(), **sizes, **drafts) as engine:
        requests = engine.generate([[number, 7] for number in range(count)], params)
        assert (engine.counters.tokens_accepted > count / 2) == bool(drafts)
    return [(r.generated_tokens, r.finish_reason, r.generated_text) for r in requests]


@pytest.mark.parametrize("method", ("itself", "ngram", "grammar"))
@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_of_many_texts_at_once_each_is_its_own_and_conforms(depth: int, method: str) -> None:
    """Elsewhere rows got the masks of their neighbours where their windows differed."""
    drafts: dict[str, Any] = {"num_speculative_tokens": 3, "speculative_method": method}
    if method == "itself":
        drafts = {"model": DraftingHashModel(3, 0.2)}
    found = texts_at_once(depth, 32, **drafts)
    assert found == texts_at_once(0, 32)
    ended = [text for _, reason, text in found if reason is FinishReason.STOP]
    assert len(ended) > 16
    for text in ended:
        value = json.loads(text)
        assert set(value) == {"ab", "c"} and value["ab"] <= 99 and len(value["c"]) <= 3


def test_drafts_that_count_as_right_at_a_rate_are_not_those_of_a_grammar() -> None:
    """``bench`` accepts drafts that no mask was made along: guided rows have none there."""
    params = SamplingParams(
        num_tokens_to_generate=20, structured_outputs={"regex": "[a-f]{12}"}, ignore_eos=True
    )
    with hash_engine(
        1, model=DraftingHashModel(3, 0.2), tokenizer=hash_tokenizer(), max_requests=2,
        block_count=30, synthetic_acceptance=0.9,
    ) as engine:  # fmt: skip
        guided, other = engine.generate([[1, 2], [3, 4]], [params, SamplingParams(ignore_eos=True)])
    assert re.fullmatch("[a-f]{12}", guided.generated_text or "")
    assert guided.counters.drafted == 0 < other.counters.accepted


# --- ends inside a window -----------------------------------------------------------------------


def decoded(depth: int, drafts: int, regexes: list[str], **values: Any) -> list[Any]:
    """Requests whose grammars are these, with drafts that know them and never err."""

    def guided(tokens: list[int]) -> Ask:
        return Ask((tokens[0], 1), 1, values.get("stop_token_ids", ()), regex=regexes[tokens[0]])

    model = DraftingHashModel(drafts, 0.0, guide=guided) if drafts else HashModel()
    with hash_engine(
        depth, model=model, tokenizer=hash_tokenizer(), max_requests=3, block_count=60
    ) as engine:
        params = [
            SamplingParams(
                temperature=0.0, num_tokens_to_generate=20, structured_outputs={"regex": regex},
                **{"termination_id": -1, **values},
            )
            for regex in regexes
        ]  # fmt: skip
        requests = engine.generate([[number, 1] for number in range(len(regexes))], params)
        assert (engine.counters.tokens_accepted > 0) == (drafts > 0)
    return [
        (
            request.generated_tokens, request.finish_reason, request.generated_text,
            [str(e.payload) for e in request.events if e.payload], request.stop_reason,
        )
        for request in requests
    ]  # fmt: skip


@pytest.mark.parametrize("drafts", (1, 3, 4))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_grammar_that_cannot_go_on_inside_a_window_ends_its_request_with_the_reason(
    depth: int, drafts: int
) -> None:
    """The vocabulary has no capitals. The reason is said once, and of no request that ended by its
    length in the same window."""
    regexes = [f"[a-f]{{{length}}}X" for length in range(1, 6)] + ["[a-f]{20}X"]
    plain, found = decoded(0, 0, regexes), decoded(depth, drafts, regexes)
    assert found == plain
    for tokens, reason, _, said, _ in found[:-1]:
        assert reason is FinishReason.ERROR and len(tokens) <= 5
        assert sum("no token of the vocabulary" in each for each in said) == 1


@pytest.mark.parametrize("stop_ids", ((), (60,), tuple(range(40, 61))))
@pytest.mark.parametrize("depth", DEPTHS)
def test_ends_at_each_place_of_a_window(depth: int, stop_ids: tuple[int, ...]) -> None:
    """By the grammar alone, by an end token, and by one of which the device knows nothing."""
    regexes = [f"[1-9]{{{length}}}" for length in range(1, 8)]
    plain = decoded(0, 0, regexes, stop_token_ids=stop_ids)
    assert decoded(depth, 4, regexes, stop_token_ids=stop_ids) == plain
    assert all(reason is FinishReason.STOP for _, reason, *_ in plain)
    lengths = {len(tokens) - bool(stop_ids) for tokens, *_ in plain}
    assert lengths == set(range(1, 8))


class Breaks:
    """A text whose library fails at one point: at a mask, at a draft, or in looking ahead."""

    def __init__(self, at: str, taken: int = 0) -> None:
        self.at, self.taken = at, taken

    def accept(self, token: int) -> bool:
        if self.at == "draft" and self.taken:
            raise RuntimeError("broken")
        self.taken += 1
        return True

    def fill_mask(self, row: Any) -> None:
        if self.at == "mask" and self.taken:
            raise RuntimeError("broken")
        row.fill(-1)

    def forced_tokens(self) -> tuple[int, ...]:
        if self.at == "ahead":
            raise RuntimeError("broken")
        return (1, 2)

    def along(self, drafts: Sequence[int]) -> Iterator[Breaks]:
        return along(self, drafts)

    @property
    def plain(self) -> None:
        return None

    def copy(self) -> Breaks:
        return Breaks(self.at, self.taken)


@pytest.mark.parametrize(
    ("at", "allow", "runs"),
    (
        ("mask", [-1, 0, 7], ((1, 2),)),
        ("draft", [-1, -1, 0], ((1, 2), (1, 2))),
        ("ahead", [-1, -1, -1], ((), (), ())),
    ),
)
def test_a_place_whose_grammar_breaks_allows_nothing_and_others_go_on(
    at: str, allow: list[int], runs: tuple[tuple[int, ...], ...]
) -> None:
    masks, masked = np.full((3, 1), 7, np.int32), np.zeros(3, np.int32)
    text: Any = Breaks(at)
    assert WindowMasks(32).fill([Window(text, [5, 6], masks, masked, guesses=True)]) == [runs]
    assert masks[:, 0].tolist() == allow
    assert masked.tolist() == [int(words != 7) for words in allow]
