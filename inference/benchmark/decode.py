"""The decode workload: rounds of steps in which every row decodes."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_async.errors import MegatronAsyncError

from ..engine_hooks import StepReport, reports_of_step
from ..steps import drive, step_summary
from .engines import Started, fit_together, make_engine
from .floor import floor_ms
from .host import HostConditions, HostWatch
from .launches import marked_launches
from .loads import Load, Request
from .measurement import Benchmark, Progress
from .model import BenchmarkModel
from .profiler import WINDOWS_SKIPPED, percentile, profile_next

PROFILED_STEPS = 50
WARM_UP_TOKENS = 12
LONG_LOAD_TOKENS = 2048
"""From so many new tokens on marks are set in the timed rounds: they cost next to nothing in a
round so long, and a round of their own would take as long again."""


class NoSteadyStepsError(MegatronAsyncError):
    """A batch is so large that its first requests end before its last ones decode."""


class Round(NamedTuple):
    """Steady decode steps: nanoseconds from the end of one to the end of the next, and of the
    step the part that the host was not blocked on the device; ``reports`` are those of all steps.
    """

    step_ns: list[int]
    host_ns: list[int]
    reports: list[StepReport]


@dataclass(slots=True)
class _Measured:
    """What has been found at one depth so far."""

    depth: int
    started: Started
    rounds: list[Round] = field(default_factory=list)
    hosts: list[HostConditions] = field(default_factory=list)
    events: dict[str, Any] | None = None


def least_new_tokens(depths: list[int]) -> int:
    """Tokens to generate for which some steady steps are left."""
    return 2 * max(depths) + 12


def start(engine: Any, batch_size: int, load: Load) -> None:
    """Reset the engine and queue one request for each row."""
    engine.reset()
    vocab_size = engine.controller.inference_wrapped_model.vocab_size
    for number, request in enumerate(load.requests(vocab_size, batch_size)):
        engine.add_request(number, request.prompt, request.params)


def warm_up(engine: Any, batch_size: int, load: Load) -> None:
    """Decode a little, so that no kernel is compiled in what is timed."""
    few = dataclasses.replace(load, new_tokens=min(load.new_tokens, WARM_UP_TOKENS))
    start(engine, batch_size, few)
    for _ in drive(engine):
        pass


def run_round(engine: Any, batch_size: int, load: Load) -> Round:
    """Decode the whole load once. Steady steps commit a token of every row; the first few of them
    fill the chain, and the last drain it: neither is counted.

    Raises:
        NoSteadyStepsError: the load is too short for such a batch.
    """
    start(engine, batch_size, load)
    counters = engine.counters
    ends: list[int] = []
    busy: list[int] = []
    tokens: list[int] = []
    reports: list[StepReport] = []
    for step in drive(engine):
        ends.append(time.perf_counter_ns())
        busy.append(counters.step_ns - counters.wait_ns)
        tokens.append(len(step["tokens"]))
        reports += reports_of_step(step)
    full = [n for n, count in enumerate(tokens) if count == batch_size]
    steady = full[engine.depth + 4 : len(full) - engine.depth - 1]
    if not steady:
        raise NoSteadyStepsError("no step decoded all rows together; raise --new-tokens")
    differences = [[times[n] - times[n - 1] for n in steady] for times in (ends, busy)]
    return Round(differences[0], differences[1], reports)


def run_marked_round(engine: Any, batch_size: int, load: Load) -> tuple[Round, Any]:
    """:func:`run_round` with a mark around each launch: the round, and what the marks say of the
    time after the prefill, plain JSON, or None."""
    with marked_launches(engine.device, after_prefill=True) as figures:
        found = run_round(engine, batch_size, load)
    return found, figures()


def profile_steps(engine: Any, batch_size: int, load: Load) -> dict[str, float] | None:
    """The device's timeline of up to ``PROFILED_STEPS`` steps in the middle of the load, and the
    device allocations made in a step; None where no step could be told from the next.

    Times in it hold the profiler's own cost: compare gaps and shares, not milliseconds.
    """
    start(engine, batch_size, load)
    count = min(PROFILED_STEPS + WINDOWS_SKIPPED, load.new_tokens - 2 * engine.depth - 6)
    for _ in range((load.new_tokens - count) // 2 + engine.depth + 2):
        engine.step_modern()
    found = profile_next(engine, count)
    engine.reset()
    return found


class DecodeBenchmark(Benchmark):
    """Measures ``load`` at each batch size and depth: timed rounds, a marked round, profiles.

    Args:
        bandwidth: of the device's memory in bytes per second, for the floor; None: there is none.
    """

    advice = "--batch-sizes or --new-tokens, or use --rounds 1 for one engine at a time"
    case = "batch"
    figure = "step_ms_mean"

    def __init__(
        self,
        model: BenchmarkModel,
        args: argparse.Namespace,
        progress: Progress,
        load: Load,
        bandwidth: float | None,
    ) -> None:
        super().__init__(model, args, progress)
        self._load = load
        self._bandwidth = bandwidth
        self._marks_timed_rounds = self.marks and load.new_tokens >= LONG_LOAD_TOKENS
        self._marks_a_round = self.marks and not self._marks_timed_rounds

    @property
    def measurements(self) -> int:
        rounds = self.args.rounds + self._marks_a_round + self.profiles
        return int(len(self.args.batch_sizes) * len(self.args.depths) * rounds)

    def run(self) -> None:
        """Timed rounds of everything first: a profiler stays felt after it has ended."""
        for batch_size in self.args.batch_sizes:
            for depths in self._groups(batch_size):
                self._measure(batch_size, depths)
        if self.profiles:
            for row in self.good_rows():
                self._profile(row)

    def batches(self) -> list[list[Request]]:
        vocab_size = self.model.config.vocab_size
        return [self._load.requests(vocab_size, size) for size in self.args.batch_sizes]

    def _groups(self, batch_size: int) -> list[list[int]]:
        """Depths whose engines live side by side, so that their rounds alternate. With one round
        there is nothing to alternate, and each engine has the memory alone."""
        depths = self.args.depths
        together = self.args.rounds > 1
        if together and fit_together(self.model, batch_size, len(depths), self._load):
            return [depths]
        return [[depth] for depth in depths]

    def _measure(self, batch_size: int, depths: list[int]) -> None:
        what = f"batch {batch_size}, depth {', '.join(map(str, depths))}"
        shape = self.model.name
        failed = [{"shape": shape, "batch": batch_size, "depth": depth} for depth in depths]
        with self.engines(what, *failed) as made:
            for depth in depths:
                self.progress.describe(f"batch {batch_size}, depth {depth}: start")
                made.append(self._start(batch_size, depth))
            pairs = zip(depths, made, strict=True)
            self._rounds(batch_size, [_Measured(depth, started) for depth, started in pairs])

    def _start(self, batch_size: int, depth: int) -> Started:
        all_buckets = self.args.all_buckets
        started = make_engine(self.model, batch_size, depth, self._load, all_buckets=all_buckets)
        warm_up(started.engine, batch_size, self._load)
        return started

    def _rounds(self, batch_size: int, depths: list[_Measured]) -> None:
        for _ in range(self.args.rounds):
            for one in depths:
                what = f"batch {batch_size}, depth {one.depth}"
                self.progress.describe(what)
                engine = one.started.engine
                with HostWatch() as watch:
                    if self._marks_timed_rounds:
                        found, one.events = run_marked_round(engine, batch_size, self._load)
                    else:
                        found = run_round(engine, batch_size, self._load)
                one.rounds.append(found)
                one.hosts.append(watch.conditions)
                step_ms = statistics.fmean(found.step_ns) * 1e-6
                self.progress.done(f"{what}: {step_ms:.3f} ms/step")
        if self._marks_a_round:
            for one in depths:
                self.progress.describe(f"batch {batch_size}, depth {one.depth}: events")
                _, one.events = run_marked_round(one.started.engine, batch_size, self._load)
                self.progress.done()
        self.add_rows([self._row(batch_size, one) for one in depths])

    def _row(self, batch_size: int, found: _Measured) -> dict[str, Any]:
        """One row of the report; times in milliseconds unless their name says otherwise."""
        steps = [ns * 1e-6 for one in found.rounds for ns in one.step_ns]
        hosts = [ns * 1e-6 for one in found.rounds for ns in one.host_ns]
        mean = statistics.fmean(steps)
        floor = self._floor_ms(batch_size)
        events = found.events
        if events is not None:
            events = {**events, "in_timed_round": self._marks_timed_rounds}
        return {
            "shape": self.model.name,
            "batch": batch_size,
            "depth": found.depth,
            "rounds": len(found.rounds),
            "steps": len(steps),
            "step_ms_mean": mean,
            "step_ms_p50": statistics.median(steps),
            "step_ms_p99": percentile(steps, 0.99),
            "round_step_ms": [statistics.fmean(one.step_ns) * 1e-6 for one in found.rounds],
            "tokens_per_second": 1e3 * batch_size / mean,
            "host_ms_mean": statistics.fmean(hosts),
            "host_ms_p50": statistics.median(hosts),
            "host_ms_p99": percentile(hosts, 0.99),
            "round_host_ms": [statistics.median(one.host_ns) * 1e-6 for one in found.rounds],
            "speedup_over_serial": None,
            "floor_ms": floor,
            "floor_share": None if floor is None else floor / mean,
            **found.started.startup_figures(),
            "step_summary": step_summary(report for one in found.rounds for report in one.reports),
            "events": events,
            "timeline": None,
            "host_conditions": [one._asdict() for one in found.hosts],
        }

    def _floor_ms(self, batch_size: int) -> float | None:
        if self._bandwidth is None:
            return None
        return floor_ms(
            self.model.config,
            self.model.dtype.itemsize,
            self._bandwidth,
            batch_size=batch_size,
            prompt_tokens=self._load.prompt_tokens,
            new_tokens=self._load.new_tokens,
        )

    def _profile(self, row: dict[str, Any]) -> None:
        what = f"profile of batch {row['batch']}, depth {row['depth']}"
        self.progress.describe(what)
        with self.engines(what) as made:
            made.append(self._start(row["batch"], row["depth"]))
            row["timeline"] = profile_steps(made[0].engine, row["batch"], self._load)
        self.progress.done()
