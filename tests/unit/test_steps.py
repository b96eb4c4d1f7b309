"""Stepping an engine to the end, and what its steps say of themselves."""

from __future__ import annotations

import json
from typing import Any

from megatron_async.engine.stepping.drive import drive
from megatron_async.request.request import StepReport, step_summary
from tests.support.engines import hash_engine, sampling_params
from tests.support.oracle import Ask

SERIAL = "serial: depth 0"
DRAINED = "drained: every running request had its last token in flight"


def report(ticket: int, depth: int, reason: str | None = None) -> StepReport:
    return StepReport(ticket, depth, reason is None, reason, committed=1, discarded=0)


def test_summary_of_nothing_is_empty() -> None:
    assert step_summary([]) == {
        "tickets": [],
        "effective_depth": {},
        "overlapped": 0,
        "not_overlapped": {},
    }


def test_summary_has_runs_of_tickets_depths_and_reasons() -> None:
    reports = [report(4, 2), report(5, 2), report(6, 1), report(9, 0, DRAINED), report(11, 2)]
    summary = step_summary([*reports, report(12, 0, SERIAL), report(13, 0, SERIAL)])
    assert summary == {
        "tickets": [[4, 6], [9, 9], [11, 13]],
        "effective_depth": {"0": 3, "1": 1, "2": 3},
        "overlapped": 4,
        "not_overlapped": {DRAINED: 1, SERIAL: 2},
    }
    assert json.loads(json.dumps(summary)) == summary
    # Each token of a window has the report of its step.
    assert step_summary([one for one in reports for _ in range(3)]) == step_summary(reports)


def test_driving_ends_when_all_requests_have_ended() -> None:
    with hash_engine(2, max_requests=2, block_count=8, debug=False) as engine:
        params = sampling_params(Ask(prompt=(4,), max_new=5))
        futures = [engine.add_request(n, [4 + n], params) for n in range(3)]
        steps: list[dict[str, Any]] = list(drive(engine))
        assert sum(len(step["tokens"]) for step in steps) == 15
        assert all(future.done() for future in futures)
        assert list(drive(engine)) == []
