"""The hash-model engine against the pure-Python oracle, at every depth, with jitter and poison."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import DEPTHS, hash_engine, random_ask, sampling_params
from tests.support.hash_model import MAX_LENGTH
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep


def run(depth: int, asks: list[Ask], **values: object) -> tuple[object, list[object]]:
    """Decode all asks and compare each with the oracle; returns the counters and requests."""
    with hash_engine(depth, **values) as engine:
        requests = engine.generate(
            [list(ask.prompt) for ask in asks], [sampling_params(ask) for ask in asks]
        )
    for ask, request in zip(asks, requests, strict=True):
        expected, reason = decode_alone(ask)
        assert request.generated_tokens == expected
        assert request.finish_reason == reason
        counts = request.counters
        assert counts.launched == counts.committed + counts.discarded
        assert counts.committed == len(expected)
    counters = engine.counters
    assert counters.steps_launched == counters.steps_committed
    assert counters.tokens_committed == sum(len(r.generated_tokens) for r in requests)
    assert counters.tokens_discarded == sum(r.counters.discarded for r in requests)
    assert counters.steps_overlapped + sum(counters.not_overlapped.values()) == (
        counters.steps_committed
    )
    return counters, requests


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_workloads_equal_the_oracle(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), label="workload"))
    depth = data.draw(st.sampled_from(DEPTHS), label="depth")
    block_size = data.draw(st.sampled_from((1, 2, 3, 4, 16, 64, 256)), label="block_size")
    worst = -(-70 // block_size)
    run(
        depth,
        [random_ask(rng) for _ in range(data.draw(st.integers(1, 16), label="requests"))],
        max_requests=data.draw(st.integers(1, 6), label="slots"),
        block_size_tokens=block_size,
        block_count=data.draw(st.integers(worst, 4 * worst), label="blocks"),
        prefill_chunk_tokens=data.draw(st.sampled_from((1, 3, 8, 64)), label="chunk"),
        jitter_seed=data.draw(st.integers(0, 99), label="jitter"),
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_workload_shows_every_event_it_is_about(depth: int) -> None:
    rng = random.Random(7)
    asks = [random_ask(rng) for _ in range(60)]
    counters, requests = run(
        depth,
        asks,
        max_requests=5,
        block_size_tokens=4,
        block_count=60,
        prefill_chunk_tokens=8,
        jitter_seed=5,
    )
    assert counters.steps_with_waiting > 0
    assert counters.prefill_chunks > len(asks)
    assert counters.blocks_granted > len(asks)
    stopped_early = [r for r in requests if r.finish_reason == "stop"]
    assert stopped_early
    # The host learns of a stop `depth` steps late; what runs over is dropped. Ends by length are
    # known beforehand and never run over.
    assert (counters.tokens_discarded > 0) == (depth > 0)
    assert all(r.counters.discarded <= depth for r in stopped_early)
    assert all(r.counters.discarded == 0 for r in requests if r.finish_reason == "length")


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_steady_decode_overlaps_all_but_its_last_step(depth: int) -> None:
    asks = [Ask(prompt=(1 + i,), max_new=200) for i in range(4)]
    counters, _ = run(depth, asks, max_requests=4, block_count=64, block_size_tokens=16)
    assert counters.steps_overlapped == counters.steps_committed - 1
    assert sum(counters.not_overlapped.values()) == 1


@pytest.mark.parametrize("depth", DEPTHS[1:])
@pytest.mark.parametrize("max_new", (1, 2, 9))
def test_batch_that_ends_all_at_once_is_refilled_without_a_drain(depth: int, max_new: int) -> None:
    asks = [Ask(prompt=(1 + i % 50,), max_new=max_new) for i in range(40)]
    counters, _ = run(depth, asks, max_requests=4, block_count=64, block_size_tokens=16)
    assert counters.steps_committed == 10 * max_new
    assert counters.steps_overlapped == counters.steps_committed - 1


def test_serial_never_overlaps_and_says_why() -> None:
    counters, _ = run(0, [Ask(prompt=(1,), max_new=20)], max_requests=2, block_count=8)
    assert counters.steps_overlapped == 0
    assert dict(counters.not_overlapped) == {"serial: depth 0": 20}


@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_do_not_depend_on_neighbours(depth: int) -> None:
    ask = Ask(prompt=(3, 5, 8), max_new=25, temperature=1.0, seed=-9)
    rng = random.Random(depth)
    _, alone = run(depth, [ask], max_requests=1, block_count=8)
    crowd = [random_ask(rng) for _ in range(10)]
    _, together = run(depth, [*crowd, ask], max_requests=4, block_count=40)
    assert alone[0].generated_tokens == together[-1].generated_tokens


@pytest.mark.parametrize("block_size", (1, 7, 256))
@pytest.mark.parametrize("depth", DEPTHS)
def test_prompts_from_one_token_to_the_models_limit(depth: int, block_size: int) -> None:
    asks = [
        Ask(prompt=(7,) * length, max_new=min(3, MAX_LENGTH - length))
        for length in (1, MAX_LENGTH - 1, 2, MAX_LENGTH - 3, 100)
    ]
    counters, _ = run(
        depth,
        asks,
        max_requests=3,
        block_size_tokens=block_size,
        block_count=2 * -(-MAX_LENGTH // block_size),
        prefill_chunk_tokens=64,
    )
    assert counters.prefill_chunks > len(asks)


@pytest.mark.parametrize("depth", DEPTHS)
def test_smallest_possible_cache_finishes_all_requests(depth: int) -> None:
    rng = random.Random(3)
    asks = [random_ask(rng, max_prompt=10, max_new=6) for _ in range(12)]
    run(depth, asks, max_requests=3, block_size_tokens=1, block_count=15, prefill_chunk_tokens=4)
