"""States of the pool of token automata: which grammar has which, and which gives way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_async.cache.automaton_space import AutomatonSpace
from megatron_async.errors import IntegrityError
from megatron_async.step.extras import DEAD_STATE


def test_no_two_grammars_have_a_state_in_common() -> None:
    """Whatever is taken and given back; what is held never moves, and what is refused would not fit
    beside it."""
    seen: Counter[str] = Counter()
    for seed in range(30):
        rng = random.Random(seed)
        space = AutomatonSpace(rng.choice((1, 2, 20, 60)))
        sizes = [rng.randint(1, 25) for _ in range(8)]
        held: Counter[int] = Counter()
        loaded: dict[int, tuple[int, int]] = {}
        for _ in range(200):
            number = rng.randrange(len(sizes))
            if held and rng.random() < 0.5:
                number = rng.choice(list(held))
                space.give_back(number)
                held[number] -= 1
                held = +held
            elif (place := space.take(number, sizes[number])) is None:
                seen["refused"] += 1
                assert number not in held
                others = sorted(loaded[each] for each in held)
                ends = [DEAD_STATE + 1, *(end for _, end in others)]
                starts = [*(start for start, _ in others), space.capacity]
                gaps = [start - end for start, end in zip(starts, ends, strict=True)]
                assert max(gaps) < sizes[number]
            else:
                first, end = place.base, place.base + sizes[number]
                assert first > DEAD_STATE and end <= space.capacity
                if place.is_new:
                    over = [n for n, (a, b) in loaded.items() if a < end and first < b]
                    assert not held.keys() & over
                    for other in over:
                        del loaded[other]
                    loaded[number] = first, end
                assert loaded[number] == (first, end)  # nothing was written there since
                seen["new" if place.is_new else "found again"] += 1
                held[number] += 1
            space.check(dict(held))
    assert min(seen.values()) > 100 and len(seen) == 3, seen


def test_a_count_that_is_off_is_found() -> None:
    space = AutomatonSpace(10)
    space.take(3, 4)
    space.check({3: 1})
    for wrong in ({}, {3: 2}, {3: 1, 4: 1}):
        with pytest.raises(IntegrityError, match="held by"):
            space.check(wrong)
