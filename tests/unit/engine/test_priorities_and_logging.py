"""Priorities, bounded overtaking, logged steps, suspension, and what the counters say of them."""

from __future__ import annotations

import logging

import pytest

from megatron_async.device.memory import GIB
from megatron_async.request.request import DynamicInferenceEventType, Status
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.masks import MaskRing
from megatron_async.runner.step_program import StepProgram
from tests.support.engines import DEPTHS, hash_engine, sampling_params
from tests.support.oracle import Ask, decode_alone

ASK = Ask(prompt=(1, 2), max_new=6)


def finish_order(engine, arrivals):  # type: ignore[no-untyped-def]
    """Ids in the order in which they end; `arrivals` maps a step to (id, priority) pairs."""
    order = []
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for request_id, priority in arrivals.get(step, ()):
            engine.add_request(
                request_id, list(ASK.prompt), sampling_params(ASK), priority=priority
            )
        order += [r.request_id for r in engine.step_modern()["finished_request_records"]]
        step += 1
    return order


@pytest.mark.parametrize("depth", DEPTHS)
def test_lower_priority_goes_first_and_equals_keep_their_order(depth: int) -> None:
    with hash_engine(depth, max_requests=1, block_count=8) as engine:
        order = finish_order(engine, {0: [(0, 5), (1, 0), (2, -1), (3, 0), (4, -1)]})
    assert order == [2, 4, 1, 3, 0]


def test_starvation_is_bounded() -> None:
    """Requests of a better priority arrive all the time; the worse one waits at most for those
    that arrive within a thousand tickets."""
    with hash_engine(1, max_requests=1, block_count=8, debug=False) as engine:
        arrivals = {0: [(0, 1)]} | {4 * i: [(i + 1, 0)] for i in range(1, 400)}
        arrivals[0].append((1000, 0))
        order = finish_order(engine, arrivals)
    before = order.index(0)
    # One arrives every four tickets.
    assert 240 < before <= 1000 // 4 + 1
    assert len(order) == 401


@pytest.mark.parametrize("enabled", (True, False))
def test_one_line_at_the_start_says_what_extras_take(
    enabled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, size in (
        (ExtrasTables, "memory_bytes", 5), (StepProgram, "extended_bytes", 2),
        (MaskRing, "memory_bytes", 3),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, size * GIB)
    with (
        caplog.at_level(logging.INFO, logger="megatron_async.runner.model_runner"),
        hash_engine(1, max_requests=2, block_count=8, enable_sampling_extras=enabled) as engine,
    ):
        slots = engine.cache.sizes.slot_count
    line = (
        f"penalties, filters and log-probabilities: 7.000 GiB for {slots} slots, 3.000 GiB of the "
        "host for masks"
    )
    assert [r.getMessage() for r in caplog.records] == [line] * enabled


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_logged_step_is_a_barrier_for_itself_alone(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    ask = Ask(prompt=(3,), max_new=100)
    with (
        caplog.at_level(logging.INFO, logger="megatron_async.engine.stepping.loop"),
        hash_engine(
            depth, max_requests=1, block_count=8, inference_logging_step_interval=10
        ) as engine,
    ):
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
        counters = engine.counters
    assert request.generated_tokens == decode_alone(ask)[0]
    logged = [r.getMessage() for r in caplog.records]
    assert [int(line.split()[1].rstrip(":")) for line in logged] == list(
        range(10, 10 * len(logged) + 1, 10)
    )
    assert counters.barriers == len(logged) >= 9
    if depth:
        # One step for each barrier, and the last one of all.
        assert counters.not_overlapped["barrier: a logged step"] == len(logged)
        assert counters.steps_committed - counters.steps_overlapped <= len(logged) + 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_suspended_engine_launches_nothing_and_keeps_requests(depth: int) -> None:
    ask = Ask(prompt=(3,), max_new=30)
    with hash_engine(depth, max_requests=1, block_count=8) as engine:
        future = engine.add_request(0, list(ask.prompt), sampling_params(ask))
        for _ in range(5):
            engine.step_modern()
        engine.suspend()
        launched = engine.counters.steps_launched
        assert launched == engine.counters.steps_committed
        for _ in range(5):
            engine.step_modern()
        assert engine.counters.steps_launched == launched
        assert engine.has_unfinished_requests()
        engine.resume()
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert future.result(timeout=0).generated_tokens == decode_alone(ask)[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_paused_request_keeps_its_place_and_its_tokens_in_flight(depth: int) -> None:
    asks = [Ask(prompt=(3,), max_new=30), Ask(prompt=(4,), max_new=30)]
    with hash_engine(
        depth, max_requests=2, block_count=8, track_paused_request_events=True
    ) as engine:
        for i, ask in enumerate(asks):
            engine.add_request(i, list(ask.prompt), sampling_params(ask))
        for _ in range(6):
            engine.step_modern()
        paused = engine.get_request(0)
        in_flight = paused.counters.launched - paused.counters.committed
        before = paused.generated_length
        assert in_flight == depth
        engine.pause_request(0)
        while engine.get_request(1).generated_length < 20:
            engine.step_modern()
        assert paused.generated_length == before + in_flight
        assert paused.status is Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
        assert engine.resume_request(0)
        while engine.has_unfinished_requests():
            engine.step_modern()
        counters = engine.counters
    assert paused.generated_tokens == decode_alone(asks[0])[0]
    assert paused.counters.evictions == paused.counters.discarded == 0
    kinds = [event.type for event in paused.events]
    assert kinds.count(DynamicInferenceEventType.PAUSE) == 1
    assert (counters.pauses, counters.resumes) == (1, 1)
    if depth:
        assert counters.steps_overlapped == counters.steps_committed - 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_paused_requests_give_way_when_nothing_else_can_run(depth: int) -> None:
    asks = [Ask(prompt=(i,) * 20, max_new=20) for i in range(3)]
    with hash_engine(
        depth, max_requests=1, block_size_tokens=4, block_count=12, enable_prefix_caching=False
    ) as engine:
        futures = []
        for i, ask in enumerate(asks):
            futures.append(engine.add_request(i, list(ask.prompt), sampling_params(ask)))
            for _ in range(8):
                engine.step_modern()
            if i < 2:
                engine.pause_request(i)
        while not futures[2].done():
            engine.step_modern()
        assert engine.counters.evictions > 0
        for i in range(2):
            engine.resume_request(i)
        while engine.has_unfinished_requests():
            engine.step_modern()
    for ask, future in zip(asks, futures, strict=True):
        assert future.result(timeout=0).generated_tokens == decode_alone(ask)[0]
