"""``megatron-async trace``: what host and device do at the same time, as a picture."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from megatron_async.benchmark.drafts import add_drafting_options, resolve_drafts
from megatron_async.cli.options.options import (
    add_benchmark_model_options,
    add_parallel_options,
)
from megatron_async.cli.options.values import integer
from megatron_async.cli.output.output_file import OutputFile
from megatron_async.cli.output.progress import progress_bar
from megatron_async.config.engine_config import DEFAULT_ASYNC_DEPTH, MAX_DEPTH, MAX_REQUESTS

_DESCRIPTION = """\
Record some decode steps and write them as a trace for https://ui.perfetto.dev: what the host does,
what the device does, and an arrow from each launch over its forward to its commit. One request
leaves the batch on the way, and another one joins. Prompts are random token ids. With drafts each
commit says how many were accepted, and a counter shows those and the rejected ones. Of several
ranks each has a host and a device of its own; of pipeline stages the bubble is said, the share of
the time in which a stage does not compute.
"""


def add_command(commands: Any) -> None:
    """Add ``trace`` to the command line."""
    said = "record decode steps as a timeline to look at"
    parser = commands.add_parser("trace", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    add_benchmark_model_options(parser)
    add_drafting_options(parser, bench=False)
    add_parallel_options(parser)
    add = parser.add_argument_group("recording").add_argument
    add("--batch-size", type=integer(1, MAX_REQUESTS), default=4, metavar="B", help="default: 4")
    depth = {"type": integer(0, MAX_DEPTH), "default": DEFAULT_ASYNC_DEPTH, "metavar": "D"}
    add("--depth", **depth, help="steps in flight; 0 is serial (default: %(default)s)")
    add("--steps", type=integer(6), default=48, metavar="N", help="steps shown (default: 48)")
    add("--prompt-tokens", type=integer(1), default=64, metavar="N", help="default: 64")
    slow = "on a GPU: show its kernels too. The profiler that sees them slows the host down"
    add("--kernels", action="store_true", help=slow)
    add("-o", "--output", default="trace.json", metavar="FILE", help="default: trace.json")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    resolve_drafts(args)
    file = OutputFile("--output", args.output)
    from megatron_async.perfetto.bubble import said
    from megatron_async.perfetto.events import trace_events
    from megatron_async.trace.record import Subject
    from megatron_async.version import __version__

    subject = Subject(args)
    title = subject.title
    with contextlib.closing(subject):
        subject.run_once()
        recording = subject.record(progress_bar(range(args.steps), desc="recording", unit="step"))
    events, summary = trace_events(recording)
    about = {"megatron-async": __version__, "title": title}
    trace = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    file.write(json.dumps(trace, separators=(",", ":")) + "\n")
    beside = f"{summary.overlapped} of {summary.commits} commits ran beside the forward of a later"
    print(f"{title}: {beside} ticket (tickets {summary.first_ticket} to {summary.last_ticket})")
    if summary.bubble is not None:
        print(f"bubble: {said(summary.bubble)} (idle, or waiting for another stage)")
    if summary.drafted:
        print(f"{summary.accepted} of {summary.drafted} drafts accepted")
    print(f"{args.output}: open it at https://ui.perfetto.dev")
    return 0
