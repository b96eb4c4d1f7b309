"""An engine goes on by itself: its own thread never sleeps beside a request that it could serve.

The thread runs under control (``tests/support/own_thread.py``): each test says how many steps it
may make, nobody asks for anything meanwhile, and a thread that sleeps must have a reason of
:class:`~megatron_async.engine.metrics.Idle`. The state machine does the same with everything that
can happen to a request (``tests/unit/test_state_machine.py``).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import EngineStoppedError
from megatron_async.step.plan import Plan
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import (
    DEPTHS,
    engine_at,
    greedy,
    hash_engine,
    random_ask,
    sampling_params,
)
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.liveness import COMMANDS, MOST_STEPS, POINTS, own_thread, place, tokens
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep

ENDS = {
    "length": {},
    "stop token": {"stop_token_ids": (decode_alone(Ask((1,), 6))[0][5],)},
    "stop word": {"stop_words": ["never"]},
}


@pytest.mark.parametrize("drafts", (0, 2))
@pytest.mark.parametrize("end", (*ENDS, "abort"))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_waits_for_blocks_is_served_when_they_come_free(
    depth: int, end: str, drafts: int
) -> None:
    """The commit that frees them comes behind the plan that found none."""
    model = DraftingHashModel(drafts, 0.3)
    engine = hash_engine(
        depth, model=model, tokenizer=hash_tokenizer(), max_requests=2, block_size_tokens=4,
        block_count=5,
    )  # fmt: skip
    with own_thread(engine) as thread:
        params = greedy(20, **ENDS.get(end, {}))
        first = engine.add_request(0, [1], params)
        thread.run(3)
        second = engine.add_request(1, [2] * 15, greedy(5))
        if end == "abort":
            thread.run(2)
            engine.abort_request(0)
        thread.run_dry(MOST_STEPS)
        assert first.done() and tokens(second) == decode_alone(Ask((2,) * 15, 5))[0]


@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("count", (2, 3, 5))
@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_that_outgrow_the_cache_in_the_same_step_all_end(
    depth: int, count: int, drafts: int
) -> None:
    """The plan that evicts one of them finds no row, and its blocks are free behind it."""
    model = DraftingHashModel(drafts, 0.3)
    engine = hash_engine(
        depth, model=model, max_requests=count, block_size_tokens=8, block_count=count * 2 + 1,
    )  # fmt: skip
    asks = [Ask((n + 1,) * 12, (count * 2 + 1) * 8 - 12) for n in range(count)]
    with own_thread(engine) as thread:
        futures = [
            engine.add_request(n, list(ask.prompt), sampling_params(ask))
            for n, ask in enumerate(asks)
        ]
        thread.run_dry(MOST_STEPS)
        assert engine.counters.evictions > 0
        assert [tokens(f) for f in futures] == [decode_alone(ask)[0] for ask in asks]


def full_engine(depth: int, **values: Any) -> DynamicInferenceEngine:
    """A cache of one longest request and a half, and prompts that share nothing."""
    return hash_engine(
        depth, max_requests=6, block_size_tokens=4, block_count=18, prefill_chunk_tokens=8,
        enable_prefix_caching=False, **values,
    )  # fmt: skip


class FreeBlocks:
    """Counts launches beside which the head of the queue was left out although it would have had
    a row and its blocks."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.passed_over = 0
        self._scheduler = engine.scheduler

    def on_launch(self, plan: Plan) -> None:
        scheduler = self._scheduler
        table, limits = scheduler.table, scheduler.limits
        head = table.waiting.head()
        if head is None or table.stalled or table.running >= limits.max_requests:
            return
        need = -(-len(head.tokens) // limits.block_size) + table.running * limits.blocks_per_row
        budget = sum(len(chunk.tokens) for chunk in plan.prefills) + plan.decode_rows
        room = limits.max_tokens - budget >= min(len(head.tokens), limits.prefill_chunk_tokens)
        self.passed_over += room and table.allocator.free_count >= need


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_soak_over_a_cache_that_is_always_full(depth: int, request: pytest.FixtureRequest) -> None:
    """All requests are there from the beginning, the thread runs free, and the cache never has
    room for all that could run. ``--long-run``: 10,000 requests at each depth."""
    count = 10_000 if request.config.getoption("--long-run") else 100
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=30, max_new=30) for _ in range(count)]
    with own_thread(full_engine(depth, debug=False)) as thread:
        engine = thread.engine
        watch = FreeBlocks(engine)
        engine.observe(watch)
        futures = [
            engine.add_request(n, list(ask.prompt), sampling_params(ask))
            for n, ask in enumerate(asks)
        ]
        thread.run_dry(200 * count)
        for ask, future in zip(asks, futures, strict=True):
            result = future.result(timeout=0)
            assert (result.generated_tokens, result.finish_reason) == decode_alone(ask)
        counters = engine.counters
        assert counters.evictions >= count / 50 and counters.stalls >= count / 50
        assert watch.passed_over == 0
        assert counters.steps_launched >= thread.steps - counters.evictions - 2 * count


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_command_at_any_point_before_the_wait_is_heeded(depth: int, name: str) -> None:
    for point in POINTS:
        at = 0
        while place(depth, name, point, at) and point != "in wait":
            at += 1
        assert at > 0 or point == "in wait", f"the thread never came to {point}"


@pytest.mark.parametrize("depth", DEPTHS)
def test_new_weights_hand_out_what_they_drain(depth: int) -> None:
    """To streams and sinks, though the thread has nothing to do behind them."""

    class Sink:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def deliver(self, taken: Any) -> None:
            self.tokens += [output.token_id for output in taken.outputs]

        def fail(self, error: EngineStoppedError) -> None:
            """At the close."""

    for steps in range(1, 8):
        sink = Sink()
        engine = engine_at(depth)
        engine.deliver_to(sink)
        with own_thread(engine) as thread:
            future = engine.add_request(0, [1], greedy(5))
            thread.run(steps)
            engine.update_weights({"salt": 0}, recompute_kv_cache=False)
            thread.run_dry(MOST_STEPS)
            assert sink.tokens == tokens(future) == decode_alone(Ask((1,), 5))[0]
