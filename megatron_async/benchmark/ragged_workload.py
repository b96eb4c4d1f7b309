"""Requests of many lengths that come and go, at each depth and arrival rate."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_async.benchmark.drafts import PLAIN, Drafts, draft_figures
from megatron_async.benchmark.measuring.engines import Started, ragged_config, start_engine
from megatron_async.benchmark.measuring.loads import RaggedLoad, Request, arrivals, with_stops
from megatron_async.benchmark.measuring.profiler import profile_run
from megatron_async.benchmark.measuring.runs import Run, request_figures, run_load
from megatron_async.benchmark.workloads import Measured, Workload

RAGGED_WARM_UP_REQUESTS = RAGGED_WARM_UP_TOKENS = 8
RAGGED_PROFILED_STEPS = 100


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
