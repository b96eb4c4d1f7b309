"""Prefixes are shared within a salt alone: in the engine, in its records and in its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.cache.block_hash import block_hash, prefix_hashes
from megatron_async.cache.cache_salt import salt_hash, salted_root
from megatron_async.cache.event_log import EventLog, Stored
from megatron_async.cache.prefix_cache import LONG_ROOT, ROOT
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import RequestError
from megatron_async.replicas.routing import BLOCK_TOKENS, PrefixRouter
from megatron_async.sampling_params import CheckedParams, SamplingParams
from tests.support.engines import DEPTHS, greedy, small_engine

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def cached(engine: DynamicInferenceEngine, prompt: list[int], salt: str | None) -> int:
    """Tokens of a prompt that were found."""
    (request,) = engine.generate([prompt], greedy(2, cache_salt=salt))
    return request.num_cached_tokens


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prefix_is_found_within_its_salt_alone(depth: int) -> None:
    with small_engine(depth) as engine:
        salts = (None, "a", "b", "a", None, "b", "A")
        assert [cached(engine, PROMPT, salt) for salt in salts] == [0, 0, 0, 8, 8, 8, 0]


def test_sequences_of_one_request_share_its_prefix() -> None:
    with small_engine() as engine:
        (request,) = engine.generate([PROMPT], greedy(2, n=2, cache_salt="a"))
        assert [choice.num_cached_tokens for choice in request.choices] == [0, 8]


asks = st.tuples(
    st.sampled_from((None, "a", "b")), st.lists(st.sampled_from((1, 2)), min_size=5, max_size=13)
)


@settings(max_examples=25, deadline=None)
@given(st.lists(asks, min_size=2, max_size=8))
def test_no_more_is_found_than_equal_salts_have_brought(runs: list[tuple[Any, list[int]]]) -> None:
    """Against a model of the cache: the prefixes of each salt, as far as they are known."""
    known: dict[str | None, list[list[int]]] = {}
    with small_engine(block_count=200) as engine:
        for salt, prompt in runs:
            shared = [_common(prompt[:-1], other) for other in known.get(salt, [])]
            (request,) = engine.generate([prompt], greedy(2, cache_salt=salt))
            assert request.num_cached_tokens == max(shared, default=0) // BLOCK * BLOCK
            known.setdefault(salt, []).append(prompt + request.generated_tokens[:-1])


def _common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_a_recorded_run_carries_salts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with small_engine(record=str(path)) as engine:
        for salt in ("a", "b", "a"):
            cached(engine, PROMPT, salt)
    without = tmp_path / "without.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    salts = [line["params"].pop("cache_salt") for line in lines if line.get("params")]
    assert salts == ["a", "b", "a"]
    without.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file, is_faithful in ((path, True), (without, False)):
        with small_engine() as engine:
            result = replay(read_run(file), engine)
        assert result.exact and (result.differences == ()) is is_faithful


@pytest.mark.parametrize("salt", ["", 1, b"a", "a" * 1025, "\ud800", ["a"]])
def test_a_salt_is_a_text(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        SamplingParams(cache_salt=salt).validate()


def test_a_salt_comes_back_from_a_message() -> None:
    params = SamplingParams(cache_salt="ä").checked()
    assert CheckedParams.of(params).params().cache_salt == "ä"


# --- hashes ---------------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_roots_of_different_salts_and_lengths_are_different(one: str, other: str) -> None:
    salts = {one, other}
    roots = {salted_root(salt, is_long=is_long) for salt in salts for is_long in (False, True)}
    assert len(roots | {ROOT, LONG_ROOT}) == 2 * len(salts) + 2


def test_events_of_a_salt_begin_with_its_hash_and_those_of_long_requests_are_left_out() -> None:
    log = EventLog(ROOT)
    log.take()
    log.stored(salted_root("a", is_long=True), 1, (1, 2))
    log.stored(salted_root("a", is_long=False), 2, (1, 2))
    log.stored(2, 3, (3, 4))
    first, second = prefix_hashes([1, 2, 3, 4], 2, salt="a")
    assert first == block_hash(salt_hash("a"), (1, 2))
    assert log.take() == [Stored(first, salt_hash("a"), (1, 2)), Stored(second, first, (3, 4))]


def test_a_replica_is_chosen_for_a_prefix_of_the_same_salt() -> None:
    tokens = list(range(2 * BLOCK_TOKENS))
    router = PrefixRouter(seed=1)
    chosen = {salt: router.choose(tokens, {"one": 0, "two": 0}, salt) for salt in ("a", "b", None)}
    for salt, name in chosen.items():
        hashes = prefix_hashes(tokens, BLOCK_TOKENS, salt=salt)
        assert router.index.match(hashes) == {name: 2}
