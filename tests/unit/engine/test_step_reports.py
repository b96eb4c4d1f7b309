"""Each step says its ticket, its effective depth, whether it overlapped, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import NotOverlapped
from megatron_async.request.request import StepReport
from tests.support.engines import DEPTHS, engine_at, greedy, hash_engine


def run(
    engine: DynamicInferenceEngine, act: Callable[[int], object] = lambda step: None
) -> list[StepReport]:
    """Step to the end, with ``act`` after each step; all reports."""
    reports: list[StepReport] = []
    step = 0
    while engine.has_unfinished_requests():
        reports += engine.step_modern()["steps"]
        step += 1
        act(step)
        assert step < 2000
    return reports


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_committed_step_is_reported_once_and_the_record_has_its_own(depth: int) -> None:
    with engine_at(depth) as engine:
        futures = [engine.add_request(i, [i + 1], greedy(8 + i)) for i in range(4)]
        reports = run(engine)
        counters = engine.counters
    assert [r.ticket for r in reports] == list(range(counters.steps_committed))
    assert sum(r.committed for r in reports) == counters.tokens_committed
    assert sum(r.discarded for r in reports) == counters.tokens_discarded
    assert sum(r.overlapped for r in reports) == counters.steps_overlapped
    for report in reports:
        assert report.overlapped == (report.effective_depth > 0) == (report.reason is None)
        assert report.effective_depth <= depth
    if depth:
        assert [r.effective_depth for r in reports][: -depth - 1] == [depth] * (
            len(reports) - depth - 1
        )
    for future in futures:
        request = future.result(timeout=0)
        assert len(request.steps) == len(request.generated_tokens)
        assert all(step == reports[step.ticket] for step in request.steps)


def last_reason(reports: list[StepReport]) -> str | None:
    return reports[-1].reason


def test_serial_steps_say_so() -> None:
    with engine_at(0) as engine:
        engine.add_request(0, [1], greedy(5))
        assert {r.reason for r in run(engine)} == {NotOverlapped.SERIAL.value}


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_the_last_step_of_the_last_request_is_drained(depth: int) -> None:
    with engine_at(depth) as engine:
        engine.add_request(0, [1], greedy(9))
        reports = run(engine)
    assert [r.reason for r in reports if r.reason] == [NotOverlapped.DRAINED.value]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_a_step_before_nothing_but_paused_requests_is_paused_and_not_drained(depth: int) -> None:
    with engine_at(depth) as engine:
        engine.add_request(0, [1], greedy(20))
        reports: list[StepReport] = []
        for _ in range(6):
            reports += engine.step_modern()["steps"]
        engine.pause_request(0)
        for _ in range(depth + 2):
            reports += engine.step_modern()["steps"]
        assert last_reason(reports) == NotOverlapped.PAUSED.value
        engine.resume_request(0)
        reports = run(engine)
    assert [r.reason for r in reports if r.reason] == [NotOverlapped.DRAINED.value]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_a_request_paused_in_the_queue_is_paused_and_not_short_of_capacity(depth: int) -> None:
    with engine_at(depth) as engine:
        engine.add_request(0, [1], greedy(9))
        engine.add_request(1, [2], greedy(9))
        engine.pause_request(1)
        reports: list[StepReport] = []
        for _ in range(12 + depth):
            reports += engine.step_modern()["steps"]
        assert [r.reason for r in reports if r.reason] == [NotOverlapped.PAUSED.value]
        engine.resume_request(1)
        run(engine)


def test_a_cache_that_is_full_is_no_capacity() -> None:
    """The blocks of the request that ends are what the next one needs."""
    with hash_engine(2, max_requests=2, block_size_tokens=4, block_count=8) as engine:
        engine.add_request(0, [1] * 20, greedy(12))
        engine.add_request(1, [2] * 20, greedy(12))
        reports = run(engine)
    reasons = [r.reason for r in reports if r.reason]
    assert reasons == [NotOverlapped.NO_CAPACITY.value, NotOverlapped.DRAINED.value]


BARRIERS: dict[NotOverlapped, Callable[[Any], object]] = {
    NotOverlapped.SUSPENDED: lambda engine: (engine.suspend(), engine.resume()),
    NotOverlapped.WEIGHTS: lambda engine: engine.update_weights({"salt": 1}),
}


@pytest.mark.parametrize("depth", DEPTHS[1:])
@pytest.mark.parametrize("reason", BARRIERS)
def test_a_barrier_is_the_reason_of_the_one_step_before_it(
    reason: NotOverlapped, depth: int
) -> None:
    with engine_at(depth) as engine:
        engine.add_request(0, [1], greedy(30))
        reports = run(engine, lambda step: BARRIERS[reason](engine) if step == 10 else None)
    reasons = [r.reason for r in reports if r.reason]
    assert reasons == [reason.value, NotOverlapped.DRAINED.value]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_a_reset_is_the_reason_of_the_step_before_it(depth: int) -> None:
    reports: list[StepReport] = []

    class Observer:
        def on_commit(self, report: StepReport) -> None:
            reports.append(report)

    with engine_at(depth) as engine:
        engine.observe(Observer())
        engine.add_request(0, [1], greedy(30))
        for _ in range(8):
            engine.step_modern()
        engine.reset()
    assert last_reason(reports) == NotOverlapped.RESET.value
    assert [r.reason for r in reports if r.reason] == [NotOverlapped.RESET.value]


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_a_logged_step_is_a_barrier_for_itself_alone(depth: int) -> None:
    with engine_at(depth, inference_logging_step_interval=7) as engine:
        engine.add_request(0, [1], greedy(30))
        reasons = [r.reason for r in run(engine) if r.reason]
    assert reasons == [NotOverlapped.LOGGED.value] * 4 + [NotOverlapped.DRAINED.value]


def test_every_reason_has_its_test() -> None:
    tested = {
        NotOverlapped.SERIAL,
        NotOverlapped.DRAINED,
        NotOverlapped.PAUSED,
        NotOverlapped.NO_CAPACITY,
        NotOverlapped.LOGGED,
        NotOverlapped.RESET,
        NotOverlapped.LOGITS_PROCESSOR,  # tests/unit/engine/test_guided_requests.py
        *BARRIERS,
    }
    assert tested == set(NotOverlapped)


# --- observers --------------------------------------------------------------------------------


def test_observers_see_the_pieces_of_a_step_and_can_be_taken_away() -> None:
    spans: list[tuple[str, int]] = []

    class Observer:
        def on_span(self, name: str, ticket: int, start_ns: int, end_ns: int) -> None:
            assert start_ns <= end_ns
            spans.append((name, ticket))

    with engine_at(1) as engine:
        engine.add_request(0, [1], greedy(40))
        for _ in range(4):
            engine.step_modern()
        forget = engine.observe(Observer())
        engine.step_modern()
        assert [name for name, _ in spans] == ["plan", "pack", "launch", "wait", "output", "commit"]
        assert [ticket for _, ticket in spans] == [4, 4, 4, 3, 3, 3]
        forget()
        seen = len(spans)
        run(engine)
        assert len(spans) == seen


def test_lone_sample_and_missing_plan_are_seen() -> None:
    spans: list[tuple[str, int]] = []

    class Observer:
        def on_span(self, name: str, ticket: int, start_ns: int, end_ns: int) -> None:
            spans.append((name, ticket))

    with engine_at(0) as engine:
        engine.observe(Observer())
        engine.add_request(0, [1], greedy(1))
        run(engine)
        engine.step_modern()
    assert ("sample", 0) in spans and ("plan", -1) in spans
