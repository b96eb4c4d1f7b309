"""The ragged workload: requests of many lengths, some of which stop at a token, that arrive at
once or over time."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.request import DynamicInferenceRequest, FinishReason, RequestFuture

from ..engine_hooks import StepReport, reports_of_step
from ..steps import drive, step_summary
from .engines import Started, ragged_config, start_engine
from .host import HostConditions, HostWatch
from .launches import marked_launches
from .loads import RaggedLoad, Request, arrivals, with_stops
from .measurement import Benchmark, Progress
from .model import BenchmarkModel
from .profiler import percentile, profile_next

PROFILED_STEPS = 100
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of the workload: for each request its record, when it arrived and when each of its
    tokens was handed out, in seconds from the start."""

    requests: list[DynamicInferenceRequest]
    arrived: Sequence[float]
    handed_out: list[list[float]]
    seconds: float
    counters: Any
    reports: list[StepReport]
    events: dict[str, float] | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """What was generated."""
        return [request.generated_tokens for request in self.requests]


def run_workload(engine: Any, requests: Sequence[Request], arrived: Sequence[float]) -> Run:
    """Serve all requests once."""
    engine.reset()
    handed_out: list[list[float]] = [[] for _ in requests]
    futures: list[RequestFuture] = []
    reports: list[StepReport] = []
    started = time.perf_counter()
    while len(futures) < len(requests) or engine.has_unfinished_requests():
        now = time.perf_counter() - started
        while len(futures) < len(requests) and arrived[len(futures)] <= now:
            number = len(futures)
            request = requests[number]
            futures.append(engine.add_request(number, request.prompt, request.params))
        if not engine.has_unfinished_requests():
            time.sleep(min(max(arrived[len(futures)] - now, 0), 1e-3))
            continue
        step = engine.step_modern()
        now = time.perf_counter() - started
        for output in step["tokens"]:
            handed_out[output.request_id].append(now)
        reports += reports_of_step(step)
    return Run(
        seconds=time.perf_counter() - started,
        requests=[future.result() for future in futures],
        arrived=arrived,
        handed_out=handed_out,
        counters=engine.counters,
        reports=reports,
    )


def profile_middle(
    engine: Any, requests: Sequence[Request], output_tokens: int
) -> dict[str, float] | None:
    """The device's timeline after half of ``output_tokens``, all requests there at once; None
    where it could not be read."""
    engine.reset()
    for number, request in enumerate(requests):
        engine.add_request(number, request.prompt, request.params)
    for _ in drive(engine):
        if engine.counters.tokens_committed >= output_tokens // 2:
            break
    found = profile_next(engine, PROFILED_STEPS)
    engine.reset()
    return found


def figures(run: Run) -> dict[str, Any]:
    """What a run says; times in milliseconds unless their name says otherwise."""
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
        "step_summary": step_summary(run.reports),
        "events": run.events,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile in milliseconds, None of nothing."""
    if not seconds:
        return {f"{name}_p50": None, f"{name}_p99": None}
    p50, p99 = statistics.median(seconds), percentile(seconds, 0.99)
    return {f"{name}_p50": 1e3 * p50, f"{name}_p99": 1e3 * p99}


class RaggedBenchmark(Benchmark):
    """Measures ``load`` at each depth and arrival rate: a scouting run, timed runs, profiles.

    The requests' end tokens come from a serial run without any, so that they do occur. What a
    request generated is compared with what it generated in the first row.
    """

    advice = "--max-requests, --prompt-range, --output-range or --block-count"
    case = "arrival_rate"
    figure = "seconds"

    def __init__(
        self,
        model: BenchmarkModel,
        args: argparse.Namespace,
        progress: Progress,
        load: RaggedLoad,
    ) -> None:
        super().__init__(model, args, progress)
        # One size for all depths, also where the free memory decides.
        blocks = ragged_config(model, 0, load).block_count
        self._load = dataclasses.replace(load, block_count=blocks)
        self._requests: list[Request] = []
        self._reference: list[list[int]] = []

    @property
    def measurements(self) -> int:
        return 1 + len(self.args.depths) * len(self.args.arrival_rate) * int(self.args.rounds)

    def run(self) -> None:
        requests = self._load.make_requests(self.model.config.vocab_size)
        with self.engines("depth 0", {"depth": 0}) as made:
            made.append(self._start(0))
            scouted = run_workload(made[0].engine, requests, [0.0] * len(requests)).tokens
            self._requests = with_stops(requests, scouted, self._load.seed)
            self.progress.done("scouting run without end tokens")
        for depth in self.args.depths if self._requests else []:
            with self.engines(f"depth {depth}", {"depth": depth}) as made:
                made.append(self._start(depth))
                self._measure(made[0], depth)

    def batches(self) -> list[list[Request]]:
        pairs = zip(self._requests, self._reference, strict=False)
        return [[request.shortened(len(tokens)) for request, tokens in pairs]]

    def _start(self, depth: int) -> Started:
        return start_engine(self.model, ragged_config(self.model, depth, self._load), self._load)

    def _measure(self, made: Started, depth: int) -> None:
        few = [request.shortened(WARM_UP_TOKENS) for request in self._requests[:WARM_UP_REQUESTS]]
        run_workload(made.engine, few, [0.0] * len(few))
        for rate in self.args.arrival_rate:
            arrived = arrivals(rate, len(self._requests), self._load.seed)
            runs, hosts = [], []
            for _ in range(self.args.rounds):
                what = f"depth {depth}, {rate:g} requests/s"
                self.progress.describe(what)
                with HostWatch() as watch:
                    runs.append(self._run(made, arrived))
                hosts.append(watch.conditions)
                seconds, tokens = runs[-1].seconds, sum(map(len, runs[-1].tokens))
                said = f"{what}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
                self.progress.done(said)
            self.add_rows([self._row(made, depth, rate, runs, hosts)])
        if self.profiles:
            # After what is timed: a profiler slows the host. Arrivals do not matter in the middle.
            row = self.results[-len(self.args.arrival_rate)]
            try:
                row["timeline"] = profile_middle(made.engine, self._requests, row["output_tokens"])
            except Exception as error:
                self.progress.failed(f"profile of depth {depth}", error, lower=self.advice)

    def _run(self, made: Started, arrived: Sequence[float]) -> Run:
        if not self.marks:
            return run_workload(made.engine, self._requests, arrived)
        with marked_launches(made.engine.device) as marks:
            run = run_workload(made.engine, self._requests, arrived)
        run.events = marks()
        return run

    def _row(
        self,
        made: Started,
        depth: int,
        rate: float,
        runs: list[Run],
        hosts: list[HostConditions],
    ) -> dict[str, Any]:
        middle = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        self._reference = self._reference or middle.tokens
        different = max(
            sum(a != b for a, b in zip(run.tokens, self._reference, strict=True)) for run in runs
        )
        return {
            "shape": self.model.name,
            "depth": depth,
            "arrival_rate": f"{rate:g}",
            "rounds": len(runs),
            **figures(middle),
            "round_seconds": [run.seconds for run in runs],
            "requests_different": different,
            **made.startup_figures(),
            "block_count": made.engine.context.block_count,
            "timeline": None,
            "speedup_over_serial": None,
            "host_conditions": [one._asdict() for one in hosts],
        }
