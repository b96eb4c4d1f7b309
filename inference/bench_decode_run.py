"""What the decode workload measures, in order: timed rounds, a marked round, profiles."""

from __future__ import annotations

import argparse
from typing import Any

from .bench_decode import Round, profile_steps, run_marked_round, run_round, warm_up
from .bench_engine import Started, close_engines, fit_together, make_engine
from .bench_guard import Progress
from .bench_host import HostConditions, HostWatch
from .bench_load import Load, prompts
from .bench_report import compare_with_serial, figures
from .subject import Subject

LONG_LOAD_TOKENS = 2048
"""From so many new tokens on marks ride in the timed rounds: a step is long beside them then, and a
round of their own would take as long again."""

ADVICE = "--batch-sizes or --new-tokens, or use --rounds 1 for one engine at a time"


class DecodeBench:
    """Measures ``load`` at each batch size and depth; ``results`` grows row by row.

    Args:
        bandwidth: of the device's memory in bytes per second, for the floor; None: there is none.
    """

    def __init__(
        self, subject: Subject, args: argparse.Namespace, load: Load, bandwidth: float | None
    ) -> None:
        self.results: list[dict[str, Any]] = []
        self._subject = subject
        self._args = args
        self._load = load
        self._bandwidth = bandwidth
        self._cuda = subject.device.type == "cuda"
        wanted = self._cuda if args.events is None else args.events
        self._marks_ride = wanted and load.new_tokens >= LONG_LOAD_TOKENS
        self._marks_apart = wanted and not self._marks_ride

    @property
    def measurements(self) -> int:
        """How many there will be."""
        rounds = self._args.rounds + self._marks_apart + (self._args.profile and self._cuda)
        return int(len(self._args.batch_sizes) * len(self._args.depths) * rounds)

    def run(self, progress: Progress) -> None:
        """Timed rounds of everything first: a profiler stays felt after it has ended."""
        for batch_size in self._args.batch_sizes:
            for depths in self._groups(batch_size):
                self._measure(batch_size, depths, progress)
                compare_with_serial(self.results)
                progress.keep()
        if self._args.profile and self._cuda:
            for row in [row for row in self.results if "error" not in row]:
                self._profile(row, progress)
                progress.keep()

    def requests(self) -> list[list[tuple[list[int], int]]]:
        """For each batch size prompts and the tokens that they generate."""
        vocab_size = self._subject.config.vocab_size
        return [
            [(prompt, self._load.new_tokens) for prompt in prompts(vocab_size, size, self._load)]
            for size in self._args.batch_sizes
        ]

    def _groups(self, batch_size: int) -> list[list[int]]:
        """Depths whose engines live side by side, so that their rounds alternate. With one round
        there is nothing to alternate, and each engine has the memory alone."""
        depths = self._args.depths
        together = self._args.rounds > 1
        if together and fit_together(self._subject, batch_size, len(depths), self._load):
            return [depths]
        return [[depth] for depth in depths]

    def _measure(self, batch_size: int, depths: list[int], progress: Progress) -> None:
        made: list[Started] = []
        try:
            for depth in depths:
                progress.describe(f"batch {batch_size}, depth {depth}: start")
                made.append(self._make(batch_size, depth))
                warm_up(made[-1].engine, batch_size, self._load)
            self.results += self._rounds(batch_size, depths, made, progress)
        except Exception as error:
            what = f"batch {batch_size}, depth {', '.join(map(str, depths))}"
            reason = progress.failed(what, error, lower=ADVICE)
            self.results += [
                {"shape": self._subject.name, "batch": batch_size, "depth": depth, "error": reason}
                for depth in depths
            ]
        finally:
            close_engines(made)

    def _make(self, batch_size: int, depth: int) -> Started:
        all_buckets = self._args.all_buckets
        return make_engine(self._subject, batch_size, depth, self._load, all_buckets=all_buckets)

    def _rounds(
        self, batch_size: int, depths: list[int], made: list[Started], progress: Progress
    ) -> list[dict[str, Any]]:
        rounds: list[list[Round]] = [[] for _ in depths]
        hosts: list[list[HostConditions]] = [[] for _ in depths]
        events: list[Any] = [None] * len(depths)
        for _ in range(self._args.rounds):
            for n, one in enumerate(made):
                progress.describe(f"batch {batch_size}, depth {depths[n]}")
                with HostWatch() as watch:
                    if self._marks_ride:
                        found, events[n] = run_marked_round(one, batch_size, self._load)
                    else:
                        found = run_round(one.engine, batch_size, self._load)
                rounds[n].append(found)
                hosts[n].append(watch.conditions)
                step_ms = sum(found.step_ns) / len(found.step_ns) * 1e-6
                progress.done(f"batch {batch_size}, depth {depths[n]}: {step_ms:.3f} ms/step")
        if self._marks_apart:
            for n, one in enumerate(made):
                progress.describe(f"batch {batch_size}, depth {depths[n]}: events")
                _, events[n] = run_marked_round(one, batch_size, self._load)
                progress.done()
        rows = []
        for n, depth in enumerate(depths):
            row = figures(
                self._subject, self._load, batch_size, depth, rounds[n],
                started=made[n], bandwidth=self._bandwidth,
            )  # fmt: skip
            row["host_conditions"] = [one._asdict() for one in hosts[n]]
            if events[n] is not None:
                row["events"] = {**events[n], "in_timed_round": self._marks_ride}
            rows.append(row)
        return rows

    def _profile(self, row: dict[str, Any], progress: Progress) -> None:
        what = f"profile of batch {row['batch']}, depth {row['depth']}"
        progress.describe(what)
        made: list[Started] = []
        try:
            made.append(self._make(row["batch"], row["depth"]))
            warm_up(made[0].engine, row["batch"], self._load)
            row["timeline"] = profile_steps(made[0].engine, row["batch"], self._load)
        except Exception as error:
            progress.failed(what, error, lower=ADVICE)
        finally:
            close_engines(made)
        progress.done()
