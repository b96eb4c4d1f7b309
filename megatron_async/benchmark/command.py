"""``megatron-async bench``: decode steps and ragged loads, serial and asynchronous."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from megatron_async.benchmark.drafts import DRAFT_OPTIONS, add_drafting_options, resolve_drafts
from megatron_async.benchmark.measuring.loads import RANGES, Load, RaggedLoad, Range, ranges_within
from megatron_async.benchmark.measuring.one_rank import ONE_RANK
from megatron_async.cli.options.options import (
    PARALLEL_SIZES,
    PROGRAM,
    add_benchmark_model_options,
    add_parallel_options,
)
from megatron_async.cli.options.server_keys import KEY_VARIABLE
from megatron_async.cli.options.values import SEED, integer, number, several
from megatron_async.cli.output.output_file import OutputFile
from megatron_async.config.engine_config import (
    DEFAULT_RANK_TIMEOUT_SECONDS,
    MAX_DEPTH,
    MAX_REQUESTS,
)
from megatron_async.errors import ConfigError

BASELINE_NAMES = ("transformers", "transformers-cb", ONE_RANK)
EXIT_FAILED = 1
EXIT_UNWRITTEN = 2

DEFAULTS: dict[str, dict[str, Any]] = {
    "decode": {"batch_sizes": [1], **Load.own_defaults()},
    "ragged": {"arrival_rate": [math.inf], **RaggedLoad.own_defaults()},
}
"""Options that belong to one workload alone."""

COMMON_DEFAULTS: dict[str, dict[str, Any]] = {
    "decode": {"depths": [0, 1], "rounds": 3},
    "ragged": {"depths": [0, 1, 2], "rounds": 1},
}
SERVER_DEFAULTS: dict[str, Any] = {"endpoint": "completions", "client_processes": 1}
SERVER_OPTIONS = ("api_key", "served_model_name", "vocabulary", "concurrency", *SERVER_DEFAULTS)
NOT_OF_SERVER = (
    *("model", "shape", "device", "dtype", "kv_cache_dtype", "depths", "block_count", "baseline"),
    *("late_planning", "gemm_autotune_seconds", *DRAFT_OPTIONS),
)
_DESCRIPTION = """\
Measure how fast requests are decoded from prompts of random token ids, or of text. Every depth
decodes the same load on the same weights; depth 0, serial decoding, is the baseline, and so is
plain decoding where tokens are drafted. The workload "decode" measures steps in which all rows
decode, greedily unless --temperature is given; "ragged" serves requests of many lengths, a third of
which stop at a token id. --server sends the ragged load, each request to its full length, to a
server of OpenAI's API and measures what clients see. Exit status 1: a measurement failed; the
others are reported. What the columns mean: docs/benchmarking.md.
"""


def _json_object(text: str) -> str:
    if isinstance(json.loads(text), dict):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")


def length_range(text: str) -> tuple[int, int]:
    with contextlib.suppress(ValueError):
        low, high = map(int, text.split(","))
        if 1 <= low <= high:
            return low, high
    raise argparse.ArgumentTypeError(f"{text!r} must be LOW,HIGH with 1 <= LOW <= HIGH")


def _rate(text: str) -> float:
    return math.inf if text == "inf" else number(0, above=True)(text)


def _baseline(text: str) -> str:
    if text not in BASELINE_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} must be among {', '.join(BASELINE_NAMES)}")
    return text


def add_command(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    said = "measure decoding at several depths"
    parser = commands.add_parser("bench", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    add_benchmark_model_options(parser)
    add_parallel_options(parser)
    add_drafting_options(parser, bench=True)
    add = parser.add_argument_group("workload decode").add_argument
    add("--batch-sizes", type=several(integer(1, MAX_REQUESTS)), metavar="B,...", help="default: 1")
    add("--prompt-tokens", type=integer(1), metavar="N", help="default: 128")
    said = "prompts are pieces of this text, in place of random token ids"
    add("--prompt-file", metavar="FILE", help=said)
    add("--new-tokens", type=integer(1), metavar="N", help="default: 512")
    add("--temperature", type=number(0), metavar="T", help="default: 0, greedy")
    add("--top-k", type=integer(0), metavar="K", help="of --temperature; 0 is off (default: 0)")
    add("--top-p", type=number(0, 1), metavar="P", help="of --temperature; 0 is off (default: 0)")
    add("--sampling", type=_json_object, metavar="JSON", help="further sampling parameters")
    add("--sampling-rows", type=integer(1), metavar="N", help="of so many rows (default: all)")
    add("--all-buckets", action="store_true", help="capture every row bucket, not just the batch")

    _add_ragged_options(parser)
    _add_client_options(parser)
    add = parser.add_argument_group("measurement").add_argument
    depths = "steps in flight; 0 is serial (default: 0,1; ragged: 0,1,2)"
    marks = "mark each launch on the device's clock: the share of time inside steps"
    profile = "on a GPU: profile some steps after the timed rounds"
    others = "the same load by transformers (generate), transformers-cb (continuous batching) or, "
    others += "of several ranks, on one"
    report = "write the report; - is stdout, the table to stderr then"
    on_or_off = argparse.BooleanOptionalAction
    add("--workload", choices=tuple(DEFAULTS), default="decode", help="default: decode")
    add("--depths", type=several(integer(0, MAX_DEPTH)), metavar="D,...", help=depths)
    said = "plan steps as late as the device allows"
    add("--late-planning", action="store_true", default=None, help=said)
    add("--rounds", type=integer(1), metavar="N", help="per depth (default: 3; ragged: 1)")
    add("--host-work-us", type=number(0), default=0.0, metavar="N", help="spin in each commit")
    add("--stall-us", type=number(0), default=0.0, metavar="N", help="spin in every K-th commit")
    add("--stall-every", type=integer(1), metavar="K", help="see --stall-us")
    add("--seed", type=SEED, default=0, metavar="S", help="of weights and requests (default: 0)")
    add("--events", action=on_or_off, help=f"{marks} (default: on a GPU)")
    add("--profile", action=on_or_off, default=True, help=profile)
    add("--startup", action="store_true", help="time the phases of two starts first")
    add("--baseline", type=several(_baseline), metavar="NAME,...", help=others)
    add("--json", metavar="FILE|-", help=report)


def _add_ragged_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload ragged").add_argument
    rates = "requests a second, Poisson; inf is all at once (default: inf)"
    add("--requests", type=integer(1), metavar="N", help="default: 512")
    add("--max-requests", type=integer(1, MAX_REQUESTS), metavar="N", help="at once (default: 128)")
    said = "tokens (default: {}, or fewer, so that the model takes them)"
    add("--prompt-range", type=length_range, metavar="LOW,HIGH", help=said.format("32,2048"))
    add("--output-range", type=length_range, metavar="LOW,HIGH", help=said.format("16,1024"))
    add("--arrival-rate", type=several(_rate), metavar="R,...", help=rates)
    add("--block-count", type=integer(1), metavar="N", help="KV blocks (default: room for all)")


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a server's clients").add_argument
    add("--server", metavar="URL", help="send the ragged load there")
    add("--api-key", metavar="KEY", help=f"default: the first in {KEY_VARIABLE}")
    add("--served-model-name", metavar="NAME", help="default: the server's first")
    said = "prompts have token ids below N (default: the server's vocabulary, or 1000)"
    add("--vocabulary", type=integer(1), metavar="N", help=said)
    said = "streams at once (default: --max-requests)"
    add("--concurrency", type=integer(1), metavar="N", help=said)
    add("--endpoint", choices=("completions", "chat"), help="default: completions")
    said = "processes that share the streams (default: 1)"
    add("--client-processes", type=integer(1), metavar="N", help=said)


def resolve(args: argparse.Namespace) -> None:
    """Fill in the workload's defaults.

    Raises:
        ConfigError: an option belongs to the other workload, or two contradict each other.
        RequestError: nothing can be sampled so.
    """
    others = NOT_OF_SERVER if args.server else SERVER_OPTIONS
    for name in others:
        if getattr(args, name) is not None:
            joint = "does not go together with" if args.server else "belongs to"
            raise ConfigError(f"{_option(name)} {joint} --server")
    if args.server:
        args.workload = "ragged"
        for name, default in SERVER_DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, default)
    for workload, options in DEFAULTS.items():
        for name in options if workload != args.workload else ():
            if getattr(args, name) is not None:
                raise ConfigError(f"{_option(name)} belongs to --workload {workload}")
    for name, default in {**DEFAULTS[args.workload], **COMMON_DEFAULTS[args.workload]}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if (args.top_k or args.top_p) and not args.temperature:
        raise ConfigError("--top-k and --top-p belong to sampling; give a --temperature above 0")
    if args.workload == "decode":
        from megatron_async.sampling_params import SamplingParams

        sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        SamplingParams.deserialize(sampling | json.loads(args.sampling or "{}")).validate()
    if (args.temperature or args.sampling) and args.baseline:
        raise ConfigError("--baseline decodes greedily; leave sampling or --baseline out")
    if ONE_RANK in (args.baseline or ()) and all(getattr(args, k) == 1 for k in PARALLEL_SIZES):
        raise ConfigError("--baseline one belongs to several ranks; give parallel sizes too")
    if args.all_buckets and args.workload != "decode":
        raise ConfigError("--all-buckets belongs to --workload decode; ragged captures all anyway")
    resolve_drafts(args)
    if bool(args.stall_us) != (args.stall_every is not None):
        raise ConfigError("--stall-us and --stall-every belong together; give both or neither")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    ranges = {name: given for name in RANGES if (given := getattr(args, name)) is not None}
    resolve(args)
    file = None if args.json in (None, "-") else OutputFile("--json", args.json)
    from tqdm import tqdm

    from megatron_async.benchmark.progress import loud_ends

    if args.server:
        try:
            from megatron_async.benchmark.measuring.server_load import as_text as as_table
            from megatron_async.benchmark.measuring.server_load import longest_of
            from megatron_async.benchmark.measuring.server_load import measure as collect
        except ModuleNotFoundError as error:
            needed = "pip install 'megatron-async[server]'"
            raise ConfigError(f"--server needs {error.name}: {needed}") from None
    else:
        from megatron_async.benchmark.model import longest_of
        from megatron_async.benchmark.report import as_table
        from megatron_async.benchmark.runner import collect

    if args.workload == "ragged" and len(ranges) < len(RANGES):
        fit_ranges(args, ranges, longest_of(args))
    report: dict[str, Any] = {}
    unwritten = False

    def keep(latest: dict[str, Any]) -> None:
        nonlocal unwritten
        report.update(latest)
        try:
            if file is not None:
                file.write(json.dumps(report, indent=1) + "\n")
            unwritten = False
        except ConfigError as error:
            # Said once; the table will show what is still to be measured.
            if not unwritten:
                tqdm.write(f"{PROGRAM}: error: {error}", file=sys.stderr)
            unwritten = True

    with loud_ends():
        try:
            collect(args, make_load(args), command_line(args), keep)
        finally:
            # Cut off or not: what was found is not lost.
            if report.get("results"):
                if args.json == "-":
                    print(json.dumps(report, indent=1))
                to = sys.stderr if args.json == "-" else sys.stdout
                print(as_table(report), file=to, flush=True)
    if unwritten:
        return EXIT_UNWRITTEN
    return 0 if report["complete"] else EXIT_FAILED


def fit_ranges(args: argparse.Namespace, given: Mapping[str, Range], most: int | None) -> None:
    """Lower ranges that are not ``given`` until requests have at most ``most`` tokens, as many as
    the model takes, and say so."""
    found = {name: getattr(args, name) for name in RANGES}
    if most is None or found == (fitting := ranges_within(most, given)):
        return
    for name, value in fitting.items():
        setattr(args, name, value)
    options = " ".join(f"{_option(name)} {low},{high}" for name, (low, high) in fitting.items())
    print(f"{PROGRAM}: the longest request has {most} tokens here: {options}", file=sys.stderr)


def make_load(args: argparse.Namespace) -> Any:
    """The load that the options describe.

    Raises:
        ConfigError: it is too short to measure.
    """
    kind = RaggedLoad if args.workload == "ragged" else Load
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind)}
    if args.workload == "decode":
        from megatron_async.benchmark.measuring.runs import least_new_tokens

        window = 1 + max(args.num_speculative_tokens or [0])
        few = f"--new-tokens {args.new_tokens} leaves no steady steps at depth {max(args.depths)}"
        few += f" with {window - 1} drafts" if window > 1 else ""
        if args.new_tokens < (least := least_new_tokens(args.depths, window)):
            raise ConfigError(f"{few}; use at least {least}")
    return kind(**{**given, "stall_every": args.stall_every or 0})


def command_line(args: argparse.Namespace) -> str:
    """The command that measures the same again, every option written out."""
    words = [PROGRAM, "bench"]
    for name, value in vars(args).items():
        if name in ("run", "json", "api_key") or value in (None, ""):
            continue
        if name in PARALLEL_SIZES and value == 1:
            continue
        if name == "rank_timeout_seconds" and value == DEFAULT_RANK_TIMEOUT_SECONDS:
            continue
        if not isinstance(value, bool):
            several = value if isinstance(value, (list, tuple)) else [value]
            words += [_option(name), ",".join(map(_word, several))]
        elif value or name in ("profile", "events"):
            words.append(_option(name if value else f"no_{name}"))
    return shlex.join(words)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _word(value: object) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
