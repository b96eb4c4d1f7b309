"""What ``bench`` measures of any workload, in order: timed rounds, then profiles."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from megatron_async.benchmark.drafts import Drafts, all_drafts
from megatron_async.benchmark.measuring.engines import Started, close_engines
from megatron_async.benchmark.measuring.host import HostConditions, host_watch
from megatron_async.benchmark.measuring.loads import Request
from megatron_async.benchmark.measuring.runs import Run, run_load
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.benchmark.progress import Progress
from megatron_async.request.request import step_summary


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
        has_stages = model.layout_sizes.get("pipeline", 1) > 1
        self.marks = on_gpu or has_stages if args.events is None else bool(args.events)
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
        """The rows that did not fail."""
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
