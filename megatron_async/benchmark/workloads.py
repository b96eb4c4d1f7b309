"""What ``bench`` measures of its workloads, in order: timed rounds, then profiles."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from megatron_async.benchmark.drafts import PLAIN, Drafts, all_drafts, draft_figures
from megatron_async.benchmark.measuring.engines import (
    Started,
    close_engines,
    fit_together,
    make_engine,
    ragged_config,
    start_engine,
)
from megatron_async.benchmark.measuring.experts import experts_read
from megatron_async.benchmark.measuring.host import HostConditions, host_watch
from megatron_async.benchmark.measuring.loads import Load, RaggedLoad, Request, arrivals, with_stops
from megatron_async.benchmark.measuring.profiler import WINDOWS_SKIPPED, percentile, profile_run
from megatron_async.benchmark.measuring.runs import (
    Run,
    request_figures,
    run_load,
    steady_steps,
    step_figures,
)
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.benchmark.progress import Progress
from megatron_async.models.description.memory_traffic import floor_ms
from megatron_async.request.request import step_summary

LONG_LOAD_TOKENS = 2048
"""From this many new tokens on marks are set in the timed rounds: they cost next to nothing in a
round so long, and a round of their own would take as long again."""

DECODE_WARM_UP_TOKENS = 12
DECODE_PROFILED_STEPS = 50
RAGGED_WARM_UP_REQUESTS = RAGGED_WARM_UP_TOKENS = 8
RAGGED_PROFILED_STEPS = 100


class Measured(NamedTuple):
    """What has been found with one engine so far."""

    depth: int
    drafts: Drafts
    started: Started
    runs: list[Run]
    hosts: list[HostConditions]

    @property
    def said(self) -> str:
        """How it decodes."""
        return f"{self.depth}{self.drafts.said}"


class Workload(ABC):
    """Measures a load at several depths; ``results`` grows row by row.

    Attributes:
        advice: options to lower where memory runs out.
        case: what rows have in common that are compared with each other.
        figure: of a row, by which depths are compared; less is better.
        rate: of a row, by which decoding with drafts is compared with plain decoding.
    """

    advice: ClassVar[str]
    case: ClassVar[str]
    figure: ClassVar[str]
    rate: ClassVar[str]

    def __init__(self, model: BenchmarkModel, args: argparse.Namespace, progress: Progress) -> None:
        self.results: list[dict[str, Any]] = []
        self.model = model
        self.args = args
        self.progress = progress
        self.drafts = all_drafts(args)
        on_gpu = model.device.type == "cuda"
        self.marks = on_gpu if args.events is None else bool(args.events)
        self.profiles = bool(args.profile and on_gpu)

    @property
    @abstractmethod
    def measurements(self) -> int:
        """How many there will be."""

    @abstractmethod
    def run(self) -> None:
        """Measure all; what fails gets a row that says so."""

    @abstractmethod
    def batches(self) -> list[list[Request]]:
        """What was decoded, for the baselines: each with as many tokens as it generated."""

    @abstractmethod
    def said(self, run: Run, depth: int) -> str:
        """A run in a few words."""

    @contextmanager
    def engines(self, what: str, *rows: dict[str, Any]) -> Iterator[list[Started]]:
        """A list for engines, which are closed at the end. What fails with them is said, and each
        of ``rows`` goes to the results with the reason."""
        made: list[Started] = []
        try:
            yield made
        except Exception as error:
            reason = self.progress.failed(what, error, lower=self.advice)
            self.results += [{**row, "error": reason} for row in rows]
        finally:
            close_engines(made)
            self.progress.keep()

    def rounds(
        self,
        what: str,
        found: Sequence[Measured],
        requests: Sequence[Request],
        arrived: Sequence[float] | None = None,
        **marks: bool,
    ) -> None:
        """Run a load as often as asked for on each engine in turn; ``what`` has a place for the
        depth."""
        for _ in range(self.args.rounds):
            for one in found:
                here = what.format(one.said)
                self.progress.bar.set_description(here)
                with host_watch() as seen:
                    run = run_load(one.started.engine, requests, arrived, **marks)
                one.runs.append(run)
                one.hosts.extend(seen)
                self.progress.done(f"{here}: {self.said(run, one.depth)}")

    def row(self, found: Measured, run: Run, figures: dict[str, Any]) -> dict[str, Any]:
        """Return a row of the report: what all workloads say, the marks and steps of ``run``, and
        ``figures``; times in milliseconds unless their name says otherwise."""
        return {
            "shape": self.model.name,
            "depth": found.depth,
            "window": found.drafts.window,
            "rounds": len(found.runs),
            "startup_seconds": found.started.seconds,
            "capture_seconds": found.started.capture_seconds,
            "graphs": found.started.engine.runner.graph_count,
            "step_summary": step_summary(run.reports),
            "events": run.events,
            "timeline": None,
            "speedup_over_serial": None,
            "speedup_over_plain": None,
            "host_conditions": [one._asdict() for one in found.hosts],
            **figures,
        }

    def good_rows(self) -> list[dict[str, Any]]:
        """Those that did not fail."""
        return [row for row in self.results if "error" not in row]

    def add_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take results up, and fill in how many times faster each row is than the same at depth 0,
        and than plain decoding at its depth, where those were measured."""
        self.results += rows
        good = self.good_rows()
        serial = {(row[self.case], row["window"]): row for row in good if row["depth"] == 0}
        plain = {(row[self.case], row["depth"]): row for row in good if row["window"] == 1}
        for row in good:
            if other := serial.get((row[self.case], row["window"])):
                row["speedup_over_serial"] = other[self.figure] / row[self.figure]
            if other := plain.get((row[self.case], row["depth"])):
                row["speedup_over_plain"] = row[self.rate] / other[self.rate]
                if "step_ratio" in row:
                    row["step_ratio"] = row["step_ms_mean"] / other["step_ms_mean"]
        self.progress.keep()


class DecodeWorkload(Workload):
    """Steps in which every row decodes, at each batch size and depth.

    Args:
        bandwidth: of the device's memory in bytes per second, for the floor; None: there is none.
    """

    advice = "--batch-sizes or --new-tokens, or use --rounds 1 for one engine at a time"
    case = "batch"
    figure = "step_ms_mean"
    rate = "tokens_per_second"

    def __init__(self, *given: Any, load: Load, bandwidth: float | None) -> None:
        super().__init__(*given)
        self._load, self._bandwidth = load, bandwidth
        self._text: list[int] = []
        if load.prompt_file:
            self._text = self.model.tokens_of(load.prompt_file, load.prompt_tokens)
        self._marks_timed_rounds = self.marks and load.new_tokens >= LONG_LOAD_TOKENS
        self._marks_a_round = self.marks and not self._marks_timed_rounds

    @property
    def measurements(self) -> int:
        rounds = self.args.rounds + self._marks_a_round + self.profiles
        engines = len(self.args.depths) * len(self.drafts)
        return int(len(self.args.batch_sizes) * engines * rounds)

    def run(self) -> None:
        """Timed rounds of everything first: a profiler stays felt after it has ended."""
        for batch_size in self.args.batch_sizes:
            for engines in self._groups(batch_size):
                self._measure(batch_size, engines)
        if self.profiles:
            for row in self.good_rows():
                self._profile(row)

    def batches(self) -> list[list[Request]]:
        return [self._requests(size) for size in self.args.batch_sizes]

    def said(self, run: Run, depth: int) -> str:
        steps = steady_steps(run, len(run.requests), depth)
        return f"{statistics.fmean(steps.step_ms):.3f} ms/step"

    def _requests(self, batch_size: int) -> list[Request]:
        return self._load.requests(self.model.network.vocab_size, batch_size, self._text)

    def _groups(self, batch_size: int) -> list[list[tuple[int, Drafts]]]:
        """Depths and drafts whose engines live side by side, so that their rounds alternate. With
        one round there is nothing to alternate, and each engine has the memory alone."""
        engines = [(depth, drafts) for depth in self.args.depths for drafts in self.drafts]
        if self.args.rounds > 1 and fit_together(self.model, batch_size, engines, self._load):
            return [engines]
        return [[engine] for engine in engines]

    def _measure(self, batch_size: int, engines: list[tuple[int, Drafts]]) -> None:
        what = f"batch {batch_size}, depth "
        requests = self._requests(batch_size)
        failed = {"shape": self.model.name, "batch": batch_size}
        rows = [{**failed, "depth": depth, "window": drafts.window} for depth, drafts in engines]
        names = [f"{depth}{drafts.said}" for depth, drafts in engines]
        with self.engines(what + ", ".join(names), *rows) as made:
            for name, engine in zip(names, engines, strict=True):
                self.progress.bar.set_description(f"{what}{name}: start")
                made.append(self._start(requests, *engine))
            found = [Measured(*e, one, [], []) for e, one in zip(engines, made, strict=True)]
            in_rounds = self._marks_timed_rounds
            self.rounds(what + "{}", found, requests, marks=in_rounds, after_prefill=True)
            for one in found if self._marks_a_round else ():
                self.progress.bar.set_description(f"{what}{one.said}: events")
                marked = run_load(one.started.engine, requests, marks=True, after_prefill=True)
                one.runs[-1].events = marked.events
                self.progress.done()
            self.add_rows([self._row(batch_size, one) for one in found])

    def _start(self, requests: list[Request], depth: int, drafts: Drafts) -> Started:
        """With a little decoded already, so that no kernel is compiled in what is timed."""
        rows, all_buckets = len(requests), self.args.all_buckets
        started = make_engine(self.model, rows, depth, self._load, drafts, all_buckets=all_buckets)
        few = DECODE_WARM_UP_TOKENS * drafts.window
        run_load(started.engine, [one.shortened(few) for one in requests])
        return started

    def _row(self, batch_size: int, found: Measured) -> dict[str, Any]:
        rounds = [steady_steps(run, batch_size, found.depth) for run in found.runs]
        hosts = [ms for of_round in rounds for ms in of_round.host_ms]
        steps = [ms for of_round in rounds for ms in of_round.step_ms]
        tokens = statistics.fmean([count for of_round in rounds for count in of_round.tokens])
        figures = step_figures(steps, tokens)
        figures |= draft_figures([run.counters for run in found.runs], tokens / batch_size)
        last = found.runs[-1]
        experts = self._experts_read(batch_size, last, found.drafts)
        floor = self._floor_ms(batch_size, found.drafts, experts)
        if last.events is not None:
            last.events["in_timed_round"] = self._marks_timed_rounds
        more = {
            "batch": batch_size,
            "step_ratio": None,
            "round_step_ms": [statistics.fmean(of_round.step_ms) for of_round in rounds],
            "host_ms_mean": statistics.fmean(hosts),
            "host_ms_p50": statistics.median(hosts),
            "host_ms_p99": percentile(hosts, 0.99),
            "round_host_ms": [statistics.median(of_round.host_ms) for of_round in rounds],
            "experts_read": experts,
            "floor_ms": floor,
            "floor_share": None if floor is None else floor / figures["step_ms_mean"],
        }
        return self.row(found, last, figures | more)

    def _experts_read(self, batch_size: int, run: Run, drafts: Drafts) -> float | None:
        """Return the experts of a layer that a step reads; None without experts or a floor, or with
        several ranks, whose model does not run on one of them alone."""
        if self._bandwidth is None or self.model.group is not None:
            return None
        return experts_read(self.model, self._requests(batch_size), run.tokens, drafts.window)

    def _floor_ms(
        self, batch_size: int, drafts: Drafts, experts: float | None = None
    ) -> float | None:
        """Return the floor of a step. Prompt look-up reads next to nothing."""
        if self._bandwidth is None:
            return None
        model = self.model
        return floor_ms(
            model.config,
            model.dtype.itemsize,
            self._bandwidth,
            batch_size=batch_size,
            prompt_tokens=self._load.prompt_tokens,
            new_tokens=self._load.new_tokens,
            drafts=drafts.count if drafts.method == "mtp" else 0,
            draft_model=model.draft_config,
            **model.layout_sizes,
            experts=experts,
        )

    def _profile(self, row: dict[str, Any]) -> None:
        batch_size, depth = row["batch"], row["depth"]
        drafts = next(each for each in self.drafts if each.window == row["window"])
        requests, new_tokens = self._requests(batch_size), self._load.new_tokens
        most = new_tokens // drafts.window - 2 * depth - 6
        steps = min(DECODE_PROFILED_STEPS + WINDOWS_SKIPPED, most)
        before = batch_size * ((new_tokens - steps * drafts.window) // 2)
        what = f"profile of batch {batch_size}, depth {depth}{drafts.said}"
        self.progress.bar.set_description(what)
        with self.engines(what) as made:
            made.append(self._start(requests, depth, drafts))
            engine = made[0].engine
            row["timeline"] = profile_run(engine, requests, after_tokens=before, steps=steps)
        self.progress.done()


class RaggedWorkload(Workload):
    """Requests of many lengths, some of which stop at a token, at each depth and arrival rate.

    Their end tokens come from a scouting run, serial and without any, so that they do occur. What
    a request generated is compared with what it generated in the first row.
    """

    advice = "--max-requests, --prompt-range, --output-range or --block-count"
    case = "arrival_rate"
    figure = "seconds"
    rate = "output_tokens_per_second"

    def __init__(self, *given: Any, load: RaggedLoad) -> None:
        super().__init__(*given)
        # One size for all, also where the free memory decides.
        largest = max(self.args.depths), load, self.drafts[-1]
        blocks = ragged_config(self.model, *largest).block_count
        self._load = dataclasses.replace(load, block_count=blocks)
        self._requests: list[Request] = []
        self._reference: list[list[int]] = []

    @property
    def measurements(self) -> int:
        engines = len(self.args.depths) * len(self.drafts)
        return 1 + engines * len(self.args.arrival_rate) * int(self.args.rounds)

    def run(self) -> None:
        requests = self._load.make_requests(self.model.network.vocab_size)
        with self.engines("depth 0", {"depth": 0}) as made:
            made.append(self._start(0, PLAIN))
            scouted = run_load(made[0].engine, requests).tokens
            self._requests = with_stops(requests, scouted, self._load.seed)
            self.progress.done("scouting run without end tokens")
        pairs = [(depth, drafts) for depth in self.args.depths for drafts in self.drafts]
        for depth, drafts in pairs if self._requests else ():
            row = {"depth": depth, "window": drafts.window}
            with self.engines(f"depth {depth}{drafts.said}", row) as made:
                made.append(self._start(depth, drafts))
                self._measure(made[0], depth, drafts)

    def batches(self) -> list[list[Request]]:
        pairs = zip(self._requests, self._reference, strict=False)
        return [[request.shortened(len(tokens)) for request, tokens in pairs]]

    def said(self, run: Run, depth: int) -> str:
        tokens = sum(map(len, run.tokens))
        return f"{run.seconds:.2f} s, {tokens / run.seconds:.0f} tokens/s"

    def _start(self, depth: int, drafts: Drafts) -> Started:
        config = ragged_config(self.model, depth, self._load, drafts)
        return start_engine(self.model, config, self._load)

    def _measure(self, started: Started, depth: int, drafts: Drafts) -> None:
        few = self._requests[:RAGGED_WARM_UP_REQUESTS]
        run_load(started.engine, [one.shortened(RAGGED_WARM_UP_TOKENS) for one in few])
        for rate in self.args.arrival_rate:
            found = Measured(depth, drafts, started, [], [])
            arrived = arrivals(rate, len(self._requests), self._load.seed)
            what = f"depth {{}}, {rate:g} requests/s"
            self.rounds(what, [found], self._requests, arrived, marks=self.marks)
            self.add_rows([self._row(found, rate)])
        if self.profiles:
            # After what is timed: a profiler slows the host. Arrivals do not matter in the middle.
            row = self.results[-len(self.args.arrival_rate)]
            half, steps = row["output_tokens"] // 2, RAGGED_PROFILED_STEPS
            with self.engines(f"profile of depth {depth}{drafts.said}"):
                row["timeline"] = profile_run(
                    started.engine, self._requests, after_tokens=half, steps=steps
                )

    def _row(self, found: Measured, rate: float) -> dict[str, Any]:
        middle = sorted(found.runs, key=lambda run: run.seconds)[(len(found.runs) - 1) // 2]
        self._reference = self._reference or middle.tokens
        differ = None
        if found.drafts.synthetic_acceptance is None:
            differ = max(map(self._differing, found.runs))
        figures = {
            "arrival_rate": f"{rate:g}",
            **request_figures(middle),
            "round_seconds": [run.seconds for run in found.runs],
            **draft_figures([run.counters for run in found.runs], middle.counters.tokens_per_row),
            "requests_different": differ,
            "block_count": found.started.engine.cache.sizes.block_count,
        }
        return self.row(found, middle, figures)

    def _differing(self, run: Run) -> int:
        return sum(a != b for a, b in zip(run.tokens, self._reference, strict=True))
