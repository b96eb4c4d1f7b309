"""Steps in which every row decodes, at each batch size and depth."""

from __future__ import annotations

import statistics
from typing import Any

from megatron_async.benchmark.drafts import Drafts, draft_figures
from megatron_async.benchmark.measuring.engines import Started, fit_together, make_engine
from megatron_async.benchmark.measuring.experts import experts_read
from megatron_async.benchmark.measuring.loads import Load, Request
from megatron_async.benchmark.measuring.profiler import WINDOWS_SKIPPED, percentile, profile_run
from megatron_async.benchmark.measuring.runs import Run, run_load, steady_steps, step_figures
from megatron_async.benchmark.workloads import Measured, Workload
from megatron_async.models.description.memory_traffic import floor_ms

LONG_LOAD_TOKENS = 2048
"""From this many new tokens on marks are set in the timed rounds: they cost next to nothing in a
round so long, and a round of their own would take as long again."""

DECODE_WARM_UP_TOKENS = 12
DECODE_PROFILED_STEPS = 50


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
        """Start an engine and decode a little: nothing is then compiled in what is timed."""
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
            kv_itemsize=model.network.kv_cache_spec.stored.itemsize,
            layer_itemsize=model.layer_itemsize,
            expert_itemsize=model.expert_itemsize,
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
