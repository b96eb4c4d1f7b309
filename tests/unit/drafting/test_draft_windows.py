"""Rows that bring several tokens: drafted output equals undrafted output, token for token.

The drafts are a fake model's (``tests/support/drafting_model.py``); all else is the engine's own:
verification, ends inside a window, block assignments, records with a count, bounds.
"""

from __future__ import annotations

import random

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.request.request import DynamicInferenceRequest
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, greedy, hash_engine, random_ask, sampling_params
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone, text_of

pytestmark = pytest.mark.sweep

WINDOWS = (1, 2, 3, 4)


def drafting_engine(
    depth: int, window: int, *, error_rate: float = 0.3, **values: object
) -> DynamicInferenceEngine:
    return hash_engine(depth, model=DraftingHashModel(window - 1, error_rate), **values)


def check(asks: list[Ask], requests: list[DynamicInferenceRequest]) -> None:
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
        counts = request.counters
        assert counts.committed == len(request.generated_tokens) == len(request.tpot)
        assert counts.launched + counts.accepted == counts.committed + counts.discarded


@pytest.mark.parametrize("block_size", (1, 2, 3, 16, 64))
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_drafted_equals_undrafted(depth: int, window: int, block_size: int) -> None:
    rng = random.Random(100 * depth + 10 * window + block_size)
    asks = [random_ask(rng, max_prompt=20, max_new=16) for _ in range(6)]
    worst = -(-36 // block_size)
    with drafting_engine(
        depth,
        window,
        max_requests=4,
        block_size_tokens=block_size,
        block_count=2 * worst,
        prefill_chunk_tokens=8,
        jitter_seed=depth,
    ) as engine:
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
        counters = engine.counters
    check(asks, requests)
    assert counters.tokens_committed == sum(len(r.generated_tokens) for r in requests)
    assert (counters.tokens_accepted > 0) == (window > 1)
    rows = sum(r.counters.launched for r in requests)
    # Some drafts were wrong: not every row brought a whole window.
    assert window == 1 or counters.tokens_committed < rows * window


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_right_drafts_bring_whole_windows(window: int) -> None:
    ask = Ask(prompt=(1, 2, 3), max_new=1 + 10 * window)
    with drafting_engine(1, window, error_rate=0.0, max_requests=1, block_count=8) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
    check([ask], [request])
    drafts = window - 1
    assert request.counters.accepted == request.counters.drafted == 10 * drafts
    assert request.counters.accepted_by_position == [10] * drafts
    assert engine.counters.acceptance == [1.0] * drafts
    assert engine.counters.tokens_per_row == window
    reports = dict.fromkeys(request.steps)
    assert {(each.drafted, each.accepted) for each in reports} == {(0, 0), (drafts, drafts)}
    assert engine.counters.steps_launched == request.counters.launched


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_wrong_drafts_cost_steps_and_no_tokens(window: int) -> None:
    ask = Ask(prompt=(1, 2, 3), max_new=20)
    with drafting_engine(1, window, error_rate=1.0, max_requests=1, block_count=8) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
    check([ask], [request])
    assert engine.counters.acceptance == [0.0] * (window - 1)
    assert engine.counters.tokens_per_row == 1
    assert request.counters.drafted == 19 * (window - 1)
    assert request.counters.accepted == 0 and engine.counters.steps_committed == 20


@pytest.mark.parametrize("depth", DEPTHS)
def test_end_inside_a_window_drops_the_tokens_behind_it(depth: int) -> None:
    """A length, a stop id, and a stop string, each on each place of a window."""
    prompt = (5, 6, 7)
    whole, _ = decode_alone(Ask(prompt, max_new=24))
    words = [text_of([token]) for token in whole]
    kinds = {
        "length": [Ask(prompt, max_new=place) for place in range(1, 13)],
        "stop id": [Ask(prompt, max_new=24, stop_ids=(token,)) for token in whole[1:13]],
        "stop string": [Ask(prompt, max_new=24, stop_words=(word,)) for word in words if word],
    }
    asks = [ask for of_kind in kinds.values() for ask in of_kind]
    with drafting_engine(
        depth, 4, error_rate=0.0, max_requests=3, block_count=30, tokenizer=hash_tokenizer()
    ) as engine:
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
    check(asks, requests)
    for kind, of_kind in kinds.items():
        mine, requests = requests[: len(of_kind)], requests[len(of_kind) :]
        assert {r.finish_reason for r in mine} == {kind.split()[0]}
        assert all(isinstance(r.stop_reason, str) is (kind == "stop string") for r in mine)
        # What the last step kept: all of its window, or less.
        assert {r.steps.count(r.steps[-1]) for r in mine} == {1, 2, 3, 4}, kind


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_rows_launched_past_a_length_end_are_discarded_and_counted(depth: int) -> None:
    """The host cannot know how many tokens a row in flight brings."""
    ask = Ask(prompt=(9,), max_new=9)
    with drafting_engine(depth, 4, error_rate=0.0, max_requests=1, block_count=8) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
    check([ask], [request])
    assert request.counters.discarded > 0


def test_a_window_may_take_more_blocks_than_the_step_has_rows() -> None:
    asks = [Ask(prompt=(i,), max_new=20) for i in range(1, 9)]
    seen = []

    class Observer:
        def on_launch(self, plan: object) -> None:
            if not plan.prefills:  # type: ignore[attr-defined]
                seen.append(len(plan.assignments) - len(plan.rows))  # type: ignore[attr-defined]

    with drafting_engine(
        2, 4, error_rate=0.2, max_requests=8, block_size_tokens=1, block_count=300
    ) as engine:
        engine.observe(Observer())
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
    check(asks, requests)
    assert max(seen) > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_that_a_window_did_not_reach_are_adopted_by_the_next(depth: int) -> None:
    ask = Ask(prompt=(4, 4), max_new=40)
    with drafting_engine(
        depth, 4, error_rate=1.0, max_requests=1, block_size_tokens=2, block_count=60
    ) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
        assert engine.counters.blocks_granted <= -(-(42 + 4 * (depth + 1)) // 2)
        assert engine.scheduler.allocator.free_count == 60
    check([ask], [request])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("window", WINDOWS[1:])
def test_drafted_equals_undrafted_through_pauses_evictions_and_aborts(
    depth: int, window: int
) -> None:
    rng = random.Random(depth + 7 * window)
    asks = [random_ask(rng, max_prompt=20, max_new=24) for _ in range(8)]
    with drafting_engine(
        depth, window, max_requests=3, block_size_tokens=4, block_count=24, prefill_chunk_tokens=5
    ) as engine:
        futures = [
            engine.add_request(i, list(ask.prompt), sampling_params(ask))
            for i, ask in enumerate(asks)
        ]
        paused: set[int] = set()
        aborted = set()
        while engine.has_unfinished_requests():
            victim = rng.choice(engine.step_modern()["active_request_ids"] or [0])
            if rng.random() < 0.7 and engine.pause_request(victim):
                paused.add(victim)
            if rng.random() < 0.5:
                engine.evict_request(victim)
            if rng.random() < 0.01 and engine.abort_request(victim):
                aborted.add(victim)
            for number in list(paused):
                if rng.random() < 0.4:
                    engine.resume_request(number)
                    paused.discard(number)
        counters = engine.counters
    for number, (ask, future) in enumerate(zip(asks, futures, strict=True)):
        expected, reason = decode_alone(ask)
        request = future.result(timeout=0)
        if request.finish_reason == "abort":
            assert number in aborted
            assert request.generated_tokens == expected[: len(request.generated_tokens)]
        else:
            assert (request.generated_tokens, request.finish_reason) == (expected, reason)
    assert counters.evictions and counters.pauses and counters.tokens_accepted


def test_a_context_with_more_drafts_than_the_model_makes_is_refused() -> None:
    from megatron_async.models.served import ServedModel
    from tests.support.engines import config_at
    from tests.support.hash_model import HashModel

    config = config_at(1, block_count=8, num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="num_speculative_tokens=2 but the model has no layers"):
        DynamicInferenceEngine(ServedModel(network=HashModel()), config)


def test_a_draft_is_never_shown() -> None:
    """Only committed tokens reach outputs and records, in order."""
    with drafting_engine(2, 3, error_rate=0.5, max_requests=2, block_count=16) as engine:
        future = engine.add_request(0, [1, 2], greedy(25))
        shown = []
        while engine.has_unfinished_requests():
            shown += [output.token_id for output in engine.step_modern()["tokens"]]
    assert shown == future.result(timeout=0).generated_tokens
