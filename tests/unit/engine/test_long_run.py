"""A long run with random events: all counters add up, memory stays flat, nothing is left behind.
Steady runs: 99 of 100 steps overlap, whatever the workload is made of.

``--long-run`` runs 1,000,000 tokens over 10,000 requests instead of a tenth of that.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import EngineCounters, NotOverlapped
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from tests.support.engines import DEPTHS, hash_engine, sampling_params
from tests.support.hash_model import VOCAB_SIZE
from tests.support.oracle import Ask, decode_with_salts

pytestmark = pytest.mark.sweep

DEPTH = 2
LIVE = 48
"""Requests that are kept waiting or running; more arrive as others end."""
MAX_ROWS = 32
BLOCK_COUNT = 200
"""About two thirds of what full rows would take: stalls and evictions belong to the run."""
MAX_GROWTH = 4 * 2**20
"""Bytes by which the process may grow between a tenth of the run and its end."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@dataclass
class LongRun:
    """Feeds an engine, lets things happen to it, and keeps sums instead of requests."""

    requests: int
    rng: random.Random = field(default_factory=lambda: random.Random(2026))
    asks: dict[int, Ask] = field(default_factory=dict)
    """Of the requests that have not ended: whatever else is kept would grow."""
    sample: list[tuple[Ask, DynamicInferenceRequest]] = field(default_factory=list)
    salts: dict[int, int] = field(default_factory=lambda: {0: 0})
    reasons: dict[str, int] = field(default_factory=dict)
    added: int = 0
    emitted: int = 0
    launched: int = 0
    committed: int = 0
    discarded: int = 0
    resident: list[int] = field(default_factory=list)
    """At each tenth of the run, the start included."""

    def run(self, engine: DynamicInferenceEngine) -> None:
        """Decode all requests."""
        tenth = max(self.requests // 10, 1)
        steps = 0
        while self.added < self.requests or engine.has_unfinished_requests():
            while len(self.asks) < LIVE and self.added < self.requests:
                self._add(engine)
            if steps % 4 == 0 and self.asks:
                self._event(engine)
            self._take(engine.step_modern())
            steps += 1
            if sum(self.reasons.values()) >= tenth * len(self.resident):
                gc.collect()
                self.resident.append(resident_bytes())

    def _add(self, engine: DynamicInferenceEngine) -> None:
        rng = self.rng
        sampled = rng.random() < 0.2
        ask = Ask(
            prompt=tuple(rng.randrange(3) for _ in range(rng.randint(1, 60))),
            max_new=rng.randint(80, 195),
            stop_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.2 else (),
            temperature=1.0 if sampled else 0.0,
            seed=self.added,
        )
        self.asks[self.added] = ask
        engine.add_request(
            self.added, list(ask.prompt), sampling_params(ask), priority=rng.choice((0, 0, 0, -1))
        )
        self.added += 1

    def _event(self, engine: DynamicInferenceEngine) -> None:
        rng = self.rng
        # In order of age, so that what a request meets depends on the seed alone.
        victim = rng.choice(list(self.asks))
        draw = rng.random()
        if draw < 0.08:
            engine.abort_request(victim)
        elif draw < 0.3:
            engine.pause_request(victim)
        elif draw < 0.45:
            engine.evict_request(victim)
        elif draw < 0.48:
            self.salts[engine.update_weights({"salt": self.added % 7})] = self.added % 7
        else:
            for request_id in list(self.asks):
                engine.resume_request(request_id)

    def _take(self, result: dict[str, Any]) -> None:
        self.emitted += sum(output.token_id is not None for output in result["tokens"])
        for request in result["finished_request_records"]:
            # A request that ends twice is not there the second time.
            ask = self.asks.pop(request.request_id)
            self.committed += len(request.generated_tokens)
            self.reasons[request.finish_reason] = self.reasons.get(request.finish_reason, 0) + 1
            if self.rng.random() < 24 / self.requests:
                self.sample.append((ask, request))


def check_sums(run: LongRun, engine: DynamicInferenceEngine) -> None:
    """Everything that was launched was committed or discarded, and nothing else happened."""
    counters = engine.counters
    assert sum(run.reasons.values()) == run.added == run.requests
    assert run.emitted == run.committed == counters.tokens_committed
    assert run.launched == run.committed + run.discarded
    assert run.discarded == counters.tokens_discarded
    assert counters.steps_launched == counters.steps_committed
    assert counters.steps_overlapped + sum(counters.not_overlapped.values()) == (
        counters.steps_committed
    )


def check_nothing_is_left(engine: DynamicInferenceEngine) -> None:
    """No container of the engine remembers a request."""
    loop, outputs, scheduler = engine.loop, engine.outputs, engine.scheduler
    table = scheduler.table
    for kept in (
        loop.commands.waiting,
        loop._in_flight,
        loop._updated,
        outputs.outputs,
        outputs.finished,
        outputs.reports,
        outputs.ended,
        outputs.keys,
        outputs._entries,
        engine.streams,
        table.sequences,
        table.waiting,
        table.prefilling,
        table.decoding[0],
        table.stalled,
        table.retiring,
        table.control,
        table._retired_keys,
        table._freed_blocks,
        table._events,
    ):
        assert len(kept) == 0
    assert engine.in_flight_count == 0
    assert len(table.prefixes) <= BLOCK_COUNT
    assert scheduler.allocator.free_count == BLOCK_COUNT
    scheduler.check_idle()


def watch_counters(run: LongRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up each request's counters when its last ticket has retired."""
    close = OutputProcessor.close

    def counting_close(self: OutputProcessor, keys: list[int]) -> None:
        for key in keys:
            counts = self._entries[key].request.counters
            assert counts.launched == counts.committed + counts.discarded
            run.launched += counts.launched
            run.discarded += counts.discarded
        close(self, keys)

    monkeypatch.setattr(OutputProcessor, "close", counting_close)


@pytest.mark.timeout(3600)
def test_long_run_adds_up_and_leaves_nothing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = request.config.getoption("--long-run")
    run = LongRun(requests=10_000 if long else 500)
    watch_counters(run, monkeypatch)
    started = time.perf_counter()
    with hash_engine(
        DEPTH,
        debug=False,
        max_requests=MAX_ROWS,
        block_size_tokens=16,
        block_count=BLOCK_COUNT,
        prefill_chunk_tokens=32,
    ) as engine:
        run.run(engine)
    elapsed = time.perf_counter() - started
    print(f"{elapsed:.1f} s, RSS {[n >> 10 for n in run.resident]} KiB, {run.reasons}")
    print(engine.counters.to_dict())

    check_sums(run, engine)
    check_nothing_is_left(engine)
    assert run.committed >= 100 * run.requests
    assert run.resident[-1] - run.resident[1] < MAX_GROWTH
    # ERROR is for NaN logits, which the hash model never has.
    assert set(run.reasons) == set(FinishReason) - {FinishReason.ERROR}
    counters = engine.counters
    for name in ("evictions", "stalls", "pauses", "barriers", "tokens_cached", "tokens_replayed"):
        assert getattr(counters, name) > run.requests / 100, name

    assert len(run.sample) >= 8
    for ask, ended in run.sample:
        salts = [(span.start, run.salts[span.version]) for span in ended.weight_spans]
        expected, reason = decode_with_salts(ask, salts)
        if ended.finish_reason is FinishReason.ABORT:
            expected, reason = expected[: len(ended.generated_tokens)], "abort"
        assert (ended.generated_tokens, ended.finish_reason) == (expected, reason)


# --- steady runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """A workload that goes on in the same way from its beginning to its end."""

    requests: int
    prompt: tuple[int, int]
    max_new: tuple[int, int]
    every: int = 0
    """Steps between two arrivals; 0 means all at once."""
    head: tuple[int, ...] = ()
    stops: int = 0
    priorities: bool = False
    block_count: int = 64
    witness: str = "rows_launched"
    """The counter that shows that the workload is what it is called."""

    def counters(self, depth: int) -> EngineCounters:
        """Decode it on four rows."""
        rng = random.Random(1)
        arrivals = deque(
            Ask(
                (
                    *self.head,
                    *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*self.prompt))),
                ),
                rng.randint(*self.max_new),
                tuple(rng.sample(range(VOCAB_SIZE), self.stops)),
            )
            for _ in range(self.requests)
        )
        with hash_engine(
            depth,
            debug=False,
            max_requests=4,
            block_size_tokens=16,
            block_count=self.block_count,
            prefill_chunk_tokens=16,
        ) as engine:
            step = 0
            while arrivals or engine.has_unfinished_requests():
                while arrivals and (not self.every or step % self.every == 0):
                    ask = arrivals.popleft()
                    priority = len(arrivals) % 3 - 1 if self.priorities else 0
                    engine.add_request(
                        len(arrivals), list(ask.prompt), sampling_params(ask), priority=priority
                    )
                    if self.every:
                        break
                engine.step_modern()
                step += 1
        return engine.counters


STEADY = {
    "equal lengths": Steady(12, (1, 1), (100, 100)),
    "mixed lengths, constant arrivals": Steady(
        60, (1, 40), (10, 60), every=6, witness="steps_with_prefill"
    ),
    "stop tokens": Steady(120, (1, 40), (60, 60), stops=3, witness="tokens_discarded"),
    "prefix hits": Steady(
        60, (1, 8), (10, 40), every=6, head=tuple(range(40)), witness="tokens_cached"
    ),
    "memory pressure": Steady(40, (1, 30), (40, 100), block_count=18, witness="evictions"),
    "priorities": Steady(
        60, (1, 40), (10, 60), every=4, priorities=True, witness="steps_with_waiting"
    ),
}


@pytest.mark.parametrize("depth", DEPTHS[1:])
@pytest.mark.parametrize("workload", STEADY.values(), ids=STEADY)
def test_steady_workload_overlaps_99_of_100_steps(workload: Steady, depth: int) -> None:
    counters = workload.counters(depth)
    assert getattr(counters, workload.witness) > 0
    assert counters.steps_committed >= 300
    assert counters.steps_overlapped >= 0.99 * counters.steps_committed


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_cache_of_a_single_request_drains_at_changes_alone_and_says_why(depth: int) -> None:
    """Below 99 of 100: the blocks of the one that ends are what the next one needs."""
    counters = Steady(40, (1, 30), (40, 100), block_count=9).counters(depth)
    reasons = dict(counters.not_overlapped)
    assert reasons.pop(NotOverlapped.DRAINED.value) == 1
    assert set(reasons) == {NotOverlapped.NO_CAPACITY.value}
    assert reasons[NotOverlapped.NO_CAPACITY.value] <= 40 + counters.evictions
    assert counters.steps_overlapped >= 0.96 * counters.steps_committed
