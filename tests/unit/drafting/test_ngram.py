"""Drafts by prompt look-up: which they are, and that they change no token."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_async.drafting.ngram import LONGEST, look_up
from tests.support.engines import DEPTHS, hash_engine, random_ask, sampling_params
from tests.support.hash_model import HashModel
from tests.support.oracle import decode_alone


def plain(tokens: list[int], count: int) -> list[int]:
    """The latest of the longest earlier matches, in plain Python."""
    end = len(tokens) - 1
    best, longest = None, 0
    for at in range(end):
        match = 0
        while match < LONGEST and match <= at and tokens[at - match] == tokens[end - match]:
            match += 1
        if match and match >= longest:
            best, longest = at, match
    if best is None:
        return [tokens[end]] * count
    return [tokens[best + 1 + i % (end - best)] for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_look_up_finds_the_latest_of_the_longest_matches(seed: int) -> None:
    rng = random.Random(seed)
    length, count = rng.randint(6, 40), rng.randint(1, 6)
    rows = [[rng.randrange(4) for _ in range(rng.randint(1, length))] for _ in range(9)]
    history = torch.full((len(rows), length), 3, dtype=torch.int32)  # behind the end it may match
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = torch.tensor(tokens)
    ends = torch.tensor([len(tokens) - 1 for tokens in rows])
    found = look_up(history, ends, torch.arange(length), count)
    assert found.tolist() == [plain(tokens, count) for tokens in rows]


@pytest.mark.parametrize("depth", DEPTHS)
def test_drafted_equals_undrafted(depth: int) -> None:
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=20, max_new=16) for _ in range(12)]
    with hash_engine(
        depth,
        model=HashModel(),
        max_requests=4,
        block_size_tokens=4,
        block_count=13,
        prefill_chunk_tokens=8,
        num_speculative_tokens=3,
        speculative_method="ngram",
    ) as engine:
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
        counters = engine.counters
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
    assert sum(counters.accepted_by_position) == counters.tokens_accepted
    assert counters.tokens_drafted % 3 == 0 and counters.tokens_drafted > 0
