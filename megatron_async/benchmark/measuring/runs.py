"""One run of a load on an engine, and what it says of decode steps and of requests."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_async.benchmark.measuring.arrivals import Arrivals
from megatron_async.benchmark.measuring.launches import marked_launches
from megatron_async.benchmark.measuring.loads import Request
from megatron_async.benchmark.measuring.profiler import percentile
from megatron_async.errors import MegatronAsyncError
from megatron_async.perfetto.recorder import Ranks
from megatron_async.request.request import (
    DynamicInferenceRequest,
    FinishReason,
    StepReport,
)

IDLE_SECONDS = 2e-4
"""Between two looks for a request."""


class NoSteadyStepsError(MegatronAsyncError):
    """A batch is so large that its first requests end before its last ones decode."""


class StepTime(NamedTuple):
    """When a step ended, how long the host was not blocked on the device until then, both in
    nanoseconds, the tokens that it committed, and the rows that brought them."""

    end_ns: int
    busy_ns: int
    tokens: int
    rows: int


@dataclass(slots=True)
class Run:
    """What came of the requests of a load: the record of each, when it arrived and when each of
    its tokens was handed out, in seconds from the start; and what the steps took."""

    requests: list[DynamicInferenceRequest]
    arrived: Sequence[float]
    handed_out: list[list[float]]
    seconds: float
    counters: Any
    steps: list[StepTime]
    reports: list[StepReport]
    events: dict[str, Any] | None
    micro_batches: int = 1
    """Steps in which all rows bring a token."""

    @property
    def tokens(self) -> list[list[int]]:
        """What was generated."""
        return [request.generated_tokens for request in self.requests]


def run_load(
    engine: Any,
    requests: Sequence[Request],
    arrived: Sequence[float] | None = None,
    *,
    marks: bool = False,
    after_prefill: bool = False,
) -> Run:
    """Serve all requests once.

    Args:
        arrived: seconds after the start at which they arrive; None: all are there at once.
        marks: mark each launch on the device, ``after_prefill`` for figures of the time since.
    """
    engine.reset()
    handed_out: list[list[float]] = [[] for _ in requests]
    steps: list[StepTime] = []
    reports: list[StepReport] = []
    counters = engine.counters
    marking = None
    if marks:
        # Ranks that share layers do the same at the same time: one of them tells all.
        group = engine.model.group
        ranks = Ranks(engine) if group is not None and group.layout.pipeline > 1 else None
        marking = marked_launches(engine.device, ranks, after_prefill=after_prefill)
    with (
        marking or nullcontext(lambda: None) as events,
        Arrivals(engine, requests, arrived) as arrivals,
    ):
        while arrivals.more_come or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                time.sleep(IDLE_SECONDS)
                continue
            step = engine.step_modern()
            busy = counters.step_ns - counters.wait_ns
            end_ns, tokens = time.perf_counter_ns(), len(step["tokens"])
            rows = sum(report.committed - report.accepted for report in step["steps"])
            steps.append(StepTime(end_ns, busy, tokens, rows))
            now = time.perf_counter() - arrivals.started
            for output in step["tokens"]:
                handed_out[output.request_id].append(now)
            reports += step["steps"]
        seconds = time.perf_counter() - arrivals.started
    records = [future.result() for future in arrivals.futures]
    micro_batches = min(engine.limits.micro_batches, len(requests))
    return Run(
        records, arrivals.arrived, handed_out, seconds, counters, steps, reports, events(),
        micro_batches,
    )  # fmt: skip


class SteadySteps(NamedTuple):
    """Milliseconds from the end of one steady decode step to the end of the next, of each the part
    that the host was not blocked on the device, and the tokens that it committed."""

    step_ms: list[float]
    host_ms: list[float]
    tokens: list[int]


def steady_steps(run: Run, batch_size: int, depth: int) -> SteadySteps:
    """Steps that commit tokens of every row; of several micro-batches as many steps in a row, one
    of each, are taken for one. The first few of them fill the chain, and the last drain it: neither
    is counted.

    Raises:
        NoSteadyStepsError: the load is too short for such a batch.
    """
    turn = run.micro_batches
    rows = [step.rows for step in run.steps]
    full = [n for n in range(turn, len(rows) + 1) if sum(rows[n - turn : n]) == batch_size]
    steady = full[depth + 4 : len(full) - depth - 1]
    if not steady:
        raise NoSteadyStepsError("no step decoded all rows together; raise --new-tokens")
    ends = [(run.steps[n - turn - 1], run.steps[n - 1]) for n in steady]
    return SteadySteps(
        [1e-6 * (last.end_ns - before.end_ns) for before, last in ends],
        [1e-6 * (last.busy_ns - before.busy_ns) for before, last in ends],
        [sum(step.tokens for step in run.steps[n - turn : n]) for n in steady],
    )


def least_new_tokens(depths: list[int], window: int) -> int:
    """Tokens to generate for which some steady steps are left."""
    return window * (2 * max(depths) + 12)


def step_figures(steps: Sequence[float], tokens_per_step: float) -> dict[str, Any]:
    """Return the figures of decode steps, whose times are in milliseconds."""
    mean = statistics.fmean(steps)
    return {
        "steps": len(steps),
        "step_ms_mean": mean,
        "step_ms_p50": statistics.median(steps),
        "step_ms_p99": percentile(steps, 0.99),
        "tokens_per_second": 1e3 * tokens_per_step / mean,
    }


def request_figures(run: Run) -> dict[str, Any]:
    """Return the figures of throughput and latencies; times in milliseconds unless their name says
    otherwise."""
    counters = run.counters
    starts = zip(run.handed_out, run.arrived, strict=True)
    pairs = [pair for times in run.handed_out for pair in itertools.pairwise(times)]
    several = [times for times in run.handed_out if len(times) > 1]
    made = sum(map(len, run.tokens))
    asked = sum(len(request.prompt_tokens) for request in run.requests)
    steps = counters.steps_launched
    return {
        "seconds": run.seconds,
        "prompt_tokens": asked,
        "output_tokens": made,
        "output_tokens_per_second": made / run.seconds,
        "tokens_per_second": (asked + made) / run.seconds,
        **_spread("first_token_ms", [times[0] - arrived for times, arrived in starts]),
        **_spread("token_ms_request_mean", [(t[-1] - t[0]) / (len(t) - 1) for t in several]),
        **_spread("token_ms_between", [after - before for before, after in pairs]),
        "steps": steps,
        "steps_mixed": counters.steps_with_prefill,
        "steps_decode": steps - counters.steps_with_prefill,
        "rows_mean": counters.rows_launched / steps,
        "host_ms_mean": 1e-6 * (counters.step_ns - counters.wait_ns) / steps,
        "stopped": sum(r.finish_reason is FinishReason.STOP for r in run.requests),
        "tokens_discarded": counters.tokens_discarded,
        "stalls": counters.stalls,
        "evictions": counters.evictions,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile in milliseconds, None of nothing."""
    if not seconds:
        return {f"{name}_p50": None, f"{name}_p99": None}
    p50, p99 = statistics.median(seconds), percentile(seconds, 0.99)
    return {f"{name}_p50": 1e3 * p50, f"{name}_p99": 1e3 * p99}
