"""Everything that can happen to a request, in any order, against the oracle.

Hypothesis drives the real engine: hash model, CPU device, jitter and poison on, tiny caches, every
depth. `--state-machine-examples N` runs a longer profile.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megatron_async.request import Status
from tests.support.engines import DEPTHS, hash_engine, sampling_params
from tests.support.hash_model import VOCAB_SIZE
from tests.support.oracle import Ask, decode_with_salts

STEPS_PER_EXAMPLE = 110
TOTALS: dict[str, int] = {}
"""What all examples together went through: the witnesses."""

# Few different tokens, so that prompts share prefixes.
tokens = st.integers(0, 3)
asks = st.builds(
    Ask,
    prompt=st.lists(tokens, min_size=1, max_size=24).map(tuple),
    max_new=st.sampled_from((1, 2, 9, 16, 16, 16)),
    stop_ids=st.one_of(
        st.just(()),
        st.just(()),
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=8, max_size=8).map(tuple),
    ),
    temperature=st.sampled_from((0.0, 1.0)),
    top_k=st.sampled_from((0, 5)),
    seed=st.integers(0, 5),
)


class EngineMachine(RuleBasedStateMachine):
    """The engine beside what it must have produced."""

    @initialize(
        depth=st.sampled_from(DEPTHS),
        slots=st.integers(1, 5),
        block_size=st.sampled_from((1, 2, 3, 4, 8, 64)),
        spare=st.sampled_from((0, 0.3, 1)),
        chunk=st.sampled_from((1, 3, 8)),
        prefix=st.booleans(),
        logging=st.sampled_from((0, 0, 3)),
        jitter=st.integers(0, 1000),
    )
    def start(
        self,
        depth: int,
        slots: int,
        block_size: int,
        spare: float,
        chunk: int,
        prefix: bool,
        logging: int,
        jitter: int,
    ) -> None:
        smallest = -(-(24 + 16 - 1) // block_size)
        self.block_count = int(smallest * (1 + spare))
        self.engine = hash_engine(
            depth,
            max_requests=slots,
            block_size_tokens=block_size,
            block_count=self.block_count,
            prefill_chunk_tokens=chunk,
            enable_prefix_caching=prefix,
            inference_logging_step_interval=logging,
            jitter_seed=jitter,
        )
        self.depth = depth
        self.asks: dict[int, Ask] = {}
        self.futures: dict[int, Any] = {}
        self.emitted: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.salts: dict[int, list[tuple[int, int]]] = {}
        self.done: set[int] = set()

    # --- rules --------------------------------------------------------------------------------

    @rule(burst=st.lists(asks, min_size=1, max_size=5), priority=st.integers(-1, 1))
    def add(self, burst: list[Ask], priority: int) -> None:
        for ask in burst:
            request_id = len(self.asks)
            self.asks[request_id] = ask
            self.emitted[request_id] = []
            self.futures[request_id] = self.engine.add_request(
                request_id, list(ask.prompt), sampling_params(ask), priority=priority
            )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step_modern())

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asks)))
        if self.engine.abort_request(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.engine.pause_request(data.draw(st.sampled_from(sorted(self.asks))))

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.engine.resume_request(data.draw(st.sampled_from(sorted(self.asks))))

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.engine.evict_request(data.draw(st.sampled_from(sorted(self.asks))))

    @rule()
    def suspend_and_resume(self) -> None:
        self.engine.suspend()
        self.take(self.engine.step_modern())
        assert not self.engine._in_flight
        self.engine.resume()

    @rule(salt=st.integers(0, 3))
    def new_weights(self, salt: int) -> None:
        self.engine.update_weights({"salt": salt})
        self.salts[self.engine.weight_version] = salt  # type: ignore[assignment]

    # --- checks -------------------------------------------------------------------------------

    def take(self, result: dict[str, Any]) -> None:
        for output in result["tokens"]:
            assert output.request_id not in self.done, "a token after the end"
            if output.token_id is not None:
                self.emitted[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                self.done.add(output.request_id)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            TOTALS["rule_steps"] = TOTALS.get("rule_steps", 0) + 1
            self.engine.scheduler.check()
            assert len(self.engine._in_flight) <= self.depth

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for request_id in self.asks:
            engine.resume_request(request_id)
        bound = 200 + 80 * len(self.asks) * (self.depth + 1)
        while engine.has_unfinished_requests():
            self.take(engine.step_modern())
            bound -= 1
            assert bound > 0, "the engine does not come to an end"
        for request_id, ask in self.asks.items():
            request = self.futures[request_id].result(timeout=0)
            assert request.generated_tokens == self.emitted[request_id]
            salts = [(s.start, self.salts.get(s.version, 0)) for s in request.weight_spans]
            expected, reason = decode_with_salts(ask, salts)
            if request.finish_reason == "abort":
                assert request_id in self.aborted
                assert request.status is Status.FAILED
                assert request.generated_tokens == expected[: len(request.generated_tokens)]
            else:
                assert request.generated_tokens == expected
                assert request.finish_reason == reason
            counts = request.counters
            assert counts.launched == counts.committed + counts.discarded
        counters = engine.counters
        assert counters.steps_launched == counters.steps_committed
        assert counters.tokens_committed == sum(len(t) for t in self.emitted.values())
        assert engine.scheduler.allocator.free_count == self.block_count
        engine.scheduler.check_idle()
        for name in ("evictions", "stalls", "pauses", "tokens_discarded", "tokens_cached"):
            TOTALS[name] = TOTALS.get(name, 0) + getattr(counters, name)
        for name in ("tokens_replayed", "barriers", "tokens_committed"):
            TOTALS[name] = TOTALS.get(name, 0) + getattr(counters, name)
        TOTALS["aborted"] = TOTALS.get("aborted", 0) + len(self.aborted)
        engine.close()


def test_any_order_of_events_equals_the_oracle(request: pytest.FixtureRequest) -> None:
    examples = request.config.getoption("--state-machine-examples")
    TOTALS.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(TOTALS)
    assert min(TOTALS.values()) > 0, TOTALS
    assert TOTALS["rule_steps"] > 80 * examples, TOTALS
