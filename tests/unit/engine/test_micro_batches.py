"""Micro-batches: running requests in parts that are planned in turns, here on one rank."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.step.plan import Plan
from tests.support.engines import DEPTHS, config_at, greedy, hash_engine, random_ask
from tests.unit.engine.test_engine_parity import run

pytestmark = pytest.mark.sweep


class Watcher:
    """The plans of an engine, and the last ticket that was committed before each."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.plans: list[Plan] = []
        self.retired: list[int] = []
        self._scheduler = engine.scheduler
        engine.observe(self)

    def on_launch(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.retired.append(self._scheduler.retired_ticket)


def played(
    depth: int, lengths: list[int], micro_batches: int = 2, **values: Any
) -> tuple[Watcher, list[int]]:
    """Requests that generate so many tokens each; what was planned, and how many steps were in
    flight after each step."""
    sizes = {"max_requests": len(lengths), "block_size_tokens": 4, "block_count": 99} | values
    with hash_engine(depth, pipeline_micro_batches=micro_batches, **sizes) as engine:
        watcher, in_flight = Watcher(engine), []
        futures = [engine.add_request(n, [n + 1], greedy(new)) for n, new in enumerate(lengths)]
        while engine.has_unfinished_requests():
            engine.step_modern()
            in_flight.append(engine.in_flight_count)
        assert [len(future.result().generated_tokens) for future in futures] == lengths
        engine.scheduler.check_idle()
        assert (engine.counters.steps_overlapped > 0) == (depth > 0)
    return watcher, in_flight


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_random_workloads_equal_the_oracle(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), label="workload"))
    block_size = data.draw(st.sampled_from((1, 3, 16)), label="block_size")
    worst = -(-70 // block_size)
    run(
        data.draw(st.sampled_from(DEPTHS), label="depth"),
        [random_ask(rng) for _ in range(data.draw(st.integers(1, 12), label="requests"))],
        pipeline_micro_batches=data.draw(st.integers(2, 4), label="micro_batches"),
        max_requests=data.draw(st.integers(1, 6), label="slots"),
        block_size_tokens=block_size,
        block_count=data.draw(st.integers(worst, 3 * worst), label="blocks"),
        prefill_chunk_tokens=data.draw(st.sampled_from((3, 64)), label="chunk"),
        jitter_seed=data.draw(st.integers(0, 99), label="jitter"),
    )


@pytest.mark.parametrize("micro_batches", (2, 3))
@pytest.mark.parametrize("depth", DEPTHS)
def test_equal_parts_take_turns(depth: int, micro_batches: int) -> None:
    watcher, in_flight = played(depth, [20] * 6, micro_batches)
    steady = watcher.plans[micro_batches : -2 * micro_batches]
    assert len(steady) > 12
    for before, plan in pairwise(steady):
        assert len(plan.rows) == 6 // micro_batches
        assert not set(plan.rows.keys) & set(before.rows.keys)
        assert plan.after == plan.number - micro_batches
    # Steps of the others are in flight besides those that the depth allows.
    assert max(in_flight) == depth + micro_batches - 1


@pytest.mark.parametrize("micro_batches", (2, 3))
def test_serial_decoding_plans_no_row_before_its_last_token_is_committed(
    micro_batches: int,
) -> None:
    """Whatever comes and goes: parts become empty, and their rows move."""
    watcher, _ = played(0, [25, 3, 40, 9, 1, 17, 30, 2, 2, 28], micro_batches, max_requests=5)
    assert sum(plan.after > 0 for plan in watcher.plans) > 30
    for plan, retired in zip(watcher.plans, watcher.retired, strict=True):
        assert plan.after <= retired


@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_move_where_too_few_are_left(depth: int) -> None:
    """Those of one micro-batch end early: half of the other's go on in its place."""
    watcher, _ = played(depth, [30, 30, 30, 30, 4, 4, 4, 4])
    late = [plan for plan in watcher.plans if plan.is_decode_only][-16:-4]
    assert {len(plan.rows) for plan in late} == {2}
    assert len({key for plan in late for key in plan.rows.keys}) == 4
    assert all(plan.after == plan.number - 2 for plan in late)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_lone_request_is_in_each_step(depth: int) -> None:
    watcher, in_flight = played(depth, [15])
    assert len(watcher.plans) == 15 and max(in_flight[:-1], default=0) == depth
    assert [plan.after for plan in watcher.plans] == [-1, *range(14)]


def test_there_are_no_more_parts_than_requests() -> None:
    with hash_engine(1, max_requests=3, pipeline_micro_batches=1024) as engine:
        assert engine.limits.micro_batches == engine.config.pipeline_micro_batches == 3


def test_what_is_no_number_of_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_micro_batches=0"):
        config_at(1, pipeline_micro_batches=0)
