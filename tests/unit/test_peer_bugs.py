"""Bugs that other engines had under asynchronous decoding, each named after what went wrong.

Every test shows that the situation of the bug did occur, and that it did no harm. Not here, since
this version has no such feature: penalties mixed between requests, logprobs for who had not asked,
stop strings found late. Drafts (MTP) that hide an end are in ``test_draft_windows.py``.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import IntegrityError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan, Ticket
from megatron_async.step.records import StepResult
from tests.support.engines import DEPTHS, hash_engine, random_ask, sampling_params
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.oracle import Ask, decode_alone
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.sweep

ASYNC = DEPTHS[1:]
LONG = Ask(prompt=(1, 2, 3), max_new=40)


def engine_at(depth: int, **values: Any) -> DynamicInferenceEngine:
    values = {"max_requests": 4, "block_size_tokens": 4, "block_count": 160, **values}
    return hash_engine(depth, **values)


def add(engine: DynamicInferenceEngine, request_id: int, ask: Ask) -> Any:
    return engine.add_request(request_id, list(ask.prompt), sampling_params(ask))


def finish(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()


def decode(engine: DynamicInferenceEngine, asks: list[Ask]) -> list[DynamicInferenceRequest]:
    """All asks at once; each must equal the oracle."""
    requests = engine.generate([list(a.prompt) for a in asks], [sampling_params(a) for a in asks])
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
    return requests


def stop_after(count: int, prompt: tuple[int, ...], max_new: int = 40) -> Ask:
    """A request that ends by a stop token which appears first as its ``count``-th token; the last
    token of ``prompt`` gives way where its own generation has none."""
    for last in (prompt[-1], *range(61)):
        ask = Ask((*prompt[:-1], last), max_new)
        tokens, _ = decode_alone(ask)
        if tokens[count - 1] not in tokens[: count - 1]:
            return dataclasses.replace(ask, stop_ids=(tokens[count - 1],))
    raise AssertionError("no prompt has a fresh token there")


# --- results that reach the wrong request -----------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_pending_logits_survived_a_reset(depth: int) -> None:
    with engine_at(depth) as engine:
        for request_id in range(4):
            add(engine, request_id, LONG)
        for _ in range(6):
            engine.step_modern()
        assert engine.in_flight_count == depth
        assert (engine.runner.pending is not None) == (depth > 0)
        engine.reset()
        assert engine.runner.pending is None and not engine.in_flight_count
        decode(engine, [Ask(prompt=(9, 9), max_new=15)])


def test_pending_logits_were_sampled_with_the_next_row_map() -> None:
    """The row map changes in a fused step: rows behind the one that ended move up by one."""
    changed = []
    launch = ModelRunner.launch

    def watching(self: ModelRunner, plan: Plan) -> Ticket:
        pending = self.pending
        if pending is not None and plan.is_decode_only:
            changed.append(pending.plan.rows.slots != plan.rows.slots)
        return launch(self, plan)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelRunner, "launch", watching)
        with engine_at(1) as engine:
            decode(engine, [Ask((i + 1,), max_new) for i, max_new in enumerate((5, 20, 9, 30))])
    assert sum(changed) >= 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_compaction_permuted_some_parameters_and_not_others(depth: int) -> None:
    """Neighbours with unlike parameters, and rows that close up whenever one ends."""
    kinds = ((0.0, 0, 0.0), (0.7, 0, 0.0), (2.0, 5, 0.0), (1.0, 0, 0.6))
    asks = [
        Ask((i + 1,), 4 + 3 * (i % 7), (), *kinds[i % 4], seed=i * 2**40 - 3) for i in range(24)
    ]
    with engine_at(depth) as engine:
        requests = decode(engine, asks)
    assert len({len(request.generated_tokens) for request in requests}) == 7


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_random_generator_for_all_requests(depth: int) -> None:
    ask = Ask((3, 5, 8), 25, temperature=1.0, seed=-9)
    rng = random.Random(depth)
    crowd = [random_ask(rng) for _ in range(7)]
    with engine_at(depth) as engine:
        decode(engine, [ask])
        decode(engine, [*crowd, ask])
        assert engine.counters.rows_launched > engine.counters.steps_launched


@pytest.mark.parametrize("depth", ASYNC)
def test_seed_tied_to_a_lagging_host_position(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every launch the host knows fewer tokens than the one that is sampled."""
    behind: Counter[int] = Counter()
    launch = ModelRunner.launch

    def watching(self: ModelRunner, plan: Plan) -> Ticket:
        for key in plan.rows.keys[: plan.decode_rows]:
            sequence = engine.scheduler.table.sequences[key]
            behind[sequence.launched - 1 - sequence.committed] += 1
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", watching)
    with engine_at(depth) as engine:
        decode(engine, [Ask((i + 1,), 40, temperature=1.0, seed=7) for i in range(4)])
    assert behind[depth] > 100 and max(behind) == depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_placeholder_of_a_token_in_flight_reached_the_model(depth: int) -> None:
    seen: list[int] = []

    class Watching(HashModel):
        def forward(self, token_ids, position_ids, context):  # type: ignore[no-untyped-def]
            live = ~context.finished[context.token_slots]
            seen.append(int(live.sum()))
            assert bool((token_ids[live] >= 0).all()) and bool((position_ids[live] >= 0).all())
            return super().forward(token_ids, position_ids, context)

    rng = random.Random(2)
    with engine_at(depth, model=Watching(), prefill_chunk_tokens=8) as engine:
        decode(engine, [random_ask(rng) for _ in range(16)])
        assert 0 < engine.counters.steps_with_prefill < engine.counters.steps_launched
    assert sum(seen) > 200


# --- eviction ---------------------------------------------------------------------------------


def evicted_in_flight(depth: int) -> tuple[DynamicInferenceRequest, DynamicInferenceEngine]:
    """A request that was evicted twice with ``depth`` tokens in flight."""
    with engine_at(depth) as engine:
        future = add(engine, 0, LONG)
        for launched in (12, 25):
            while engine.get_request(0).counters.launched < launched:
                engine.step_modern()
            before = engine.get_request(0).counters
            assert before.launched - before.committed == depth
            engine.evict_request(0)
            engine.step_modern()
        finish(engine)
    request: DynamicInferenceRequest = future.result(timeout=0)
    assert request.counters.evictions == 2 and request.counters.replayed > 0
    return request, engine


@pytest.mark.parametrize("depth", ASYNC)
def test_in_flight_token_of_an_evicted_request_appended_to_its_new_prompt(depth: int) -> None:
    request, _ = evicted_in_flight(depth)
    assert request.generated_tokens == decode_alone(LONG)[0]


@pytest.mark.parametrize("depth", ASYNC)
def test_duplicate_tokens_after_preemption(depth: int) -> None:
    """Each token is launched, committed and counted once."""
    request, engine = evicted_in_flight(depth)
    counts = request.counters
    assert (counts.launched, counts.committed, counts.discarded) == (40, 40, 0)
    assert engine.counters.tokens_committed == 40


@pytest.mark.parametrize("depth", ASYNC)
def test_count_of_tokens_in_flight_underflowed(depth: int) -> None:
    """In any order of stops, aborts and evictions it stays between 0 and the depth."""
    rng = random.Random(depth)
    in_flight: Counter[int] = Counter()
    with engine_at(depth, block_count=20) as engine:
        for request_id in range(24):
            add(engine, request_id, random_ask(rng))
        step = 0
        while engine.has_unfinished_requests():
            active = list(engine.outputs.keys)
            if active and step % 7 == 3:
                engine.evict_request(rng.choice(active))
            if active and step % 23 == 5:
                engine.abort_request(rng.choice(active))
            engine.step_modern()
            step += 1
            for entry in engine.outputs._entries.values():
                counts = entry.request.counters
                in_flight[counts.launched - counts.committed - counts.discarded] += 1
    assert engine.counters.evictions > 3 and engine.counters.tokens_discarded > 0
    assert min(in_flight) == 0 and max(in_flight) == depth


# --- blocks, rings, buffers -------------------------------------------------------------------


@pytest.mark.parametrize("leave", ("abort", "evict", "stop", "length"))
@pytest.mark.parametrize("depth", ASYNC)
def test_block_freed_while_a_forward_in_flight_still_read_it(
    depth: int, leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a ticket in flight names the request, none of its blocks is given to another."""
    ask = LONG
    if leave == "stop":
        ask = stop_after(9, (4, 4))
    elif leave == "length":
        ask = Ask((4, 4), 9)
    held: set[int] = set()
    in_flight = assigned = 0
    launch = ModelRunner.launch

    def watching(self: ModelRunner, plan: Plan) -> Ticket:
        nonlocal in_flight, assigned
        sequence = scheduler.table.sequences.get(0)
        named = {key for t in engine.loop._in_flight for key in t.plan.rows.keys}
        if 0 in named:
            assert sequence is not None and held
            others = [a.block for a in plan.assignments if a.slot != sequence.slot]
            assert not held & set(others)
            assert all(scheduler.allocator.references(block) for block in held)
            in_flight += 0 not in plan.rows.keys
            assigned += len(others) * (0 not in plan.rows.keys)
        else:
            held.clear()
        held.update(sequence.blocks if sequence is not None else ())
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", watching)
    with engine_at(depth, block_size_tokens=1) as engine:
        scheduler = engine.scheduler
        future = add(engine, 0, ask)
        add(engine, 1, Ask((7,), 60))
        for step in range(40):
            if step == 9 and leave in ("abort", "evict"):
                {"abort": engine.abort_request, "evict": engine.evict_request}[leave](0)
            engine.step_modern()
        finish(engine)
        assert scheduler.allocator.free_count == 160
    # An evicted request comes back and then ends by its length.
    assert in_flight == (2 * depth if leave == "evict" else depth)
    assert assigned >= depth
    tokens = future.result(timeout=0).generated_tokens
    assert tokens == decode_alone(ask)[0][: len(tokens)]


@pytest.mark.parametrize("depth", ASYNC)
def test_pinned_input_buffer_reused_too_early(depth: int) -> None:
    """The device is so late that it reads no packet before the host waits for it."""
    waits = threading.Semaphore(0)

    class Late(CpuDevice):
        def mark_ticket(self, ticket: int) -> None:
            super().mark_ticket(ticket)
            if ticket == 0:
                self.enqueue(lambda: _acquire(waits), "late")

    late = Late(poison=True)
    unread = []
    with engine_at(depth, device=late) as engine:
        packets: Any = engine.runner._packets
        results: Any = engine.runner._results
        wait = results.wait

        def waiting(number: int, width: int) -> Any:
            if number == 0:
                unread.append(packets._claimed - packets._consumed)
                waits.release()
            return wait(number, width)

        results.wait = waiting
        decode(engine, [LONG, Ask((5, 6), 30)])
        number = packets._claimed
        for ahead in range(depth + 2):
            packets.claim(number + ahead)
        with pytest.raises(IntegrityError, match="not consumed yet"):
            packets.claim(number + depth + 2)
    assert unread == [depth + 1]


def _acquire(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=PATIENCE_SECONDS), "the host never waited"


@pytest.mark.parametrize("depth", ASYNC)
def test_future_token_ring_wrapped(depth: int) -> None:
    """Both rings wrap many times with every entry in use; a result is taken once, in order."""
    with engine_at(depth) as engine:
        decode(engine, [Ask((i,), 100, temperature=1.0, seed=i) for i in range(4)])
        results: Any = engine.runner._results
        assert results._published == results._taken == 100
        assert results._taken > 10 * results._ring.shape[0]
        with pytest.raises(IntegrityError, match="100 is next"):
            results.wait(99, 1)


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_token_too_few_or_too_many_when_finish_reads_live_state(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the commit of the last token but ``depth`` all tokens have been launched already."""
    early = 0
    commit = Scheduler.commit

    def watching(self: Scheduler, plan: Plan, result: StepResult) -> Any:
        nonlocal early
        sequences = [self.table.sequences.get(key) for key in plan.rows.keys]
        early += sum(s is not None and s.launched == s.max_new > s.committed + 1 for s in sequences)
        return commit(self, plan, result)

    monkeypatch.setattr(Scheduler, "commit", watching)
    with engine_at(depth) as engine:
        requests = decode(engine, [Ask((i + 1,), 2 + i) for i in range(12)])
    assert [len(request.generated_tokens) for request in requests] == list(range(2, 14))
    assert (early > 0) == (depth > 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_known_length_runs_over(depth: int) -> None:
    """Not a single row more than tokens: an end by length is known when it is launched."""
    with engine_at(depth) as engine:
        requests = decode(engine, [Ask((i + 1,), 1 + i % 9) for i in range(20)])
    assert engine.counters.rows_launched == sum(len(r.generated_tokens) for r in requests)
    assert engine.counters.tokens_discarded == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_found_steps_late_by_the_host_emitted_what_ran_over(depth: int) -> None:
    asks = [stop_after(8, (4, 4)), Ask((7,), 40)]
    with engine_at(depth) as engine:
        stopped, _ = decode(engine, asks)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.counters.discarded == depth
    assert len(stopped.generated_tokens) == 8


# --- paths that were not taken ----------------------------------------------------------------


def launches(depth: int, asks: list[Ask], arrive: Callable[[int], bool]) -> Counter[str]:
    """Names of the pieces of device work of a run in which one ask arrives where ``arrive``."""
    device = CpuDevice(record=True)
    with engine_at(depth, device=device, debug=False) as engine:
        step = request_id = 0
        while request_id < len(asks) or engine.has_unfinished_requests():
            if request_id < len(asks) and arrive(step):
                add(engine, request_id, asks[request_id])
                request_id += 1
            engine.step_modern()
            step += 1
        assert engine.counters.steps_overlapped >= 0.99 * engine.counters.steps_committed
    return Counter(span.name for span in device.timeline or [] if span.ticket >= 0)


@pytest.mark.parametrize("depth", ASYNC)
def test_fast_path_that_fired_on_a_fraction_of_calls(depth: int) -> None:
    names = launches(depth, [Ask((i + 1,), 120 + i) for i in range(4)], lambda step: True)
    assert names["S H2D F"] >= 0.95 * (names.total() - names["S"])


@pytest.mark.parametrize("depth", ASYNC)
def test_admission_costs_serial_steps(depth: int) -> None:
    """Each arrival costs its own mixed step and no more: the rest is fused, nothing drains."""
    asks = [Ask((i % VOCAB_SIZE,), 30) for i in range(20)]
    names = launches(depth, asks, lambda step: step % 10 == 0)
    assert names["H2D F mixed"] == 20
    assert names["S H2D F"] >= 0.99 * (names.total() - names["S"] - names["H2D F mixed"]) - 20


@pytest.mark.parametrize("depth", ASYNC)
def test_request_that_does_not_fit_kept_the_others_serial(depth: int) -> None:
    """The head of the queue finds no room for many steps; the chain goes on."""
    long = Ask(tuple(range(60)), 30)
    with engine_at(depth, block_count=24) as engine:
        add(engine, 0, Ask((1,), 90))
        for _ in range(40):
            engine.step_modern()
        future = add(engine, 1, long)
        for _ in range(45):
            engine.step_modern()
        waited = engine.counters
        assert waited.steps_with_waiting == 45
        assert waited.steps_overlapped == waited.steps_committed
        finish(engine)
    assert future.result().generated_tokens == decode_alone(long)[0]


def test_step_that_read_a_device_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's thread reads no tensor between the launch of a step and its one wait."""
    host = threading.get_ident()
    calls: Counter[str] = Counter()
    inside = False

    def guarded(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any) -> Any:
            on_host = threading.get_ident() == host
            calls[name if on_host else "device"] += 1
            assert not (on_host and inside), f"Tensor.{name} while a step is launched"
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in ("item", "tolist", "__bool__", "__int__", "cpu"):
        guarded(name)
    launch = ModelRunner.launch

    def watching(self: ModelRunner, plan: Plan) -> Ticket:
        nonlocal inside
        inside = True
        try:
            return launch(self, plan)
        finally:
            inside = False

    monkeypatch.setattr(ModelRunner, "launch", watching)
    with engine_at(2) as engine:
        engine.generate([[1, 2], [3]], sampling_params(Ask((1,), 20)))
    assert calls["device"] > 0, "the guard saw nothing"
