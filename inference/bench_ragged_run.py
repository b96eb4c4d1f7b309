"""What the ragged workload measures, in order: a scouting run, timed runs, profiles."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from .bench_engine import Started, close_engines, ragged_config, start_engine
from .bench_guard import Progress
from .bench_host import HostWatch
from .bench_load import RaggedLoad
from .bench_ragged import (
    Run,
    Wish,
    arrivals,
    figures,
    make_wishes,
    profile_middle,
    run_workload,
    shortened,
    with_stops,
)
from .subject import Subject

ADVICE = "--max-requests, --prompt-range, --output-range or --block-count"
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8


class RaggedBench:
    """Measures ``load`` at each depth and arrival rate; ``results`` grows row by row.

    The requests' end tokens come from a serial run without any, so that they do occur. What a
    request generated is compared with what it generated in the first row.
    """

    def __init__(self, subject: Subject, args: argparse.Namespace, load: RaggedLoad) -> None:
        self.results: list[dict[str, Any]] = []
        self._subject = subject
        self._args = args
        # One size for all depths, also where the free memory decides.
        blocks = ragged_config(subject, 0, load).block_count
        self._load = dataclasses.replace(load, block_count=blocks)
        self._events = subject.device.type == "cuda" if args.events is None else args.events
        self._wishes: list[Wish] = []
        self._reference: list[list[int]] | None = None

    @property
    def measurements(self) -> int:
        """How many there will be."""
        rates = len(self._args.arrival_rate)
        return int(1 + len(self._args.depths) * rates * self._args.rounds)

    def run(self, progress: Progress) -> None:
        """Measure; a depth that fails gets a row that says so."""
        wishes = make_wishes(self._subject.config.vocab_size, self._load)
        scouted = self._guarded(0, progress, partial(self._scout, wishes=wishes))
        if scouted is None:
            return
        progress.done("scouting run without end tokens")
        self._wishes = wishes = with_stops(wishes, scouted, self._load.seed)
        for depth in self._args.depths:
            work = partial(self._depth, depth=depth, wishes=wishes, progress=progress)
            self._guarded(depth, progress, work)

    def requests(self) -> list[list[tuple[list[int], int]]]:
        """Prompts, and as many tokens as they generated here."""
        pairs = zip(self._wishes, self._reference or [], strict=False)
        return [[(wish.prompt, len(tokens)) for wish, tokens in pairs]]

    def _guarded(self, depth: int, progress: Progress, work: Callable[[Started], Any]) -> Any:
        made: list[Started] = []
        try:
            config = ragged_config(self._subject, depth, self._load)
            made.append(start_engine(self._subject, config, self._load))
            return work(made[0])
        except Exception as error:
            reason = progress.failed(f"depth {depth}", error, lower=ADVICE)
            self.results.append({"depth": depth, "error": reason})
            return None
        finally:
            close_engines(made)
            progress.keep()

    def _scout(self, made: Started, *, wishes: list[Wish]) -> list[list[int]]:
        return run_workload(made, wishes, [0.0] * len(wishes), mark=False).tokens

    def _depth(self, made: Started, *, depth: int, wishes: list[Wish], progress: Progress) -> None:
        few = [shortened(wish, WARM_UP_TOKENS) for wish in wishes[:WARM_UP_REQUESTS]]
        run_workload(made, few, [0.0] * len(few), mark=False)
        for rate in self._args.arrival_rate:
            arrived = arrivals(rate, len(wishes), self._load.seed)
            runs, hosts = [], []
            for _ in range(self._args.rounds):
                progress.describe(f"depth {depth}, {rate:g} requests/s")
                with HostWatch() as watch:
                    runs.append(run_workload(made, wishes, arrived, mark=self._events))
                hosts.append(watch.conditions)
                progress.done(
                    f"depth {depth}, {rate:g} requests/s: {runs[-1].seconds:.2f} s, "
                    f"{sum(map(len, runs[-1].tokens)) / runs[-1].seconds:.0f} tokens/s"
                )
            self.results.append(self._row(made, depth, rate, runs))
            self.results[-1]["host_conditions"] = [one._asdict() for one in hosts]
            compare_with_serial(self.results)
            progress.keep()
        if self._args.profile and self._subject.device.type == "cuda":
            # After what is timed: a profiler slows the host. Arrivals do not matter in the middle.
            row = self.results[-len(self._args.arrival_rate)]
            try:
                row["timeline"] = profile_middle(made, wishes, row["output_tokens"])
            except Exception as error:
                progress.failed(f"profile of depth {depth}", error, lower=ADVICE)

    def _row(self, made: Started, depth: int, rate: float, runs: list[Run]) -> dict[str, Any]:
        middle = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        if self._reference is None:
            self._reference = middle.tokens
        different = max(
            sum(a != b for a, b in zip(run.tokens, self._reference, strict=True)) for run in runs
        )
        return {
            "shape": self._subject.name,
            "depth": depth,
            "arrival_rate": f"{rate:g}",
            "rounds": len(runs),
            **figures(middle),
            "round_seconds": [run.seconds for run in runs],
            "requests_different": different,
            "startup_seconds": made.seconds,
            "capture_seconds": made.capture_seconds,
            "graphs": made.graphs,
            "block_count": made.engine.context.block_count,
            "timeline": None,
            "speedup_over_serial": None,
        }


def compare_with_serial(results: list[dict[str, Any]]) -> None:
    """Fill in how many times faster than depth 0 each row is, at the same arrival rate."""
    good = [row for row in results if "error" not in row]
    serial = {row["arrival_rate"]: row["seconds"] for row in good if row["depth"] == 0}
    for row in good:
        if row["arrival_rate"] in serial:
            row["speedup_over_serial"] = serial[row["arrival_rate"]] / row["seconds"]
