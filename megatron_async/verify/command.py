"""``megatron-async verify``: asynchronous decoding gives the tokens of serial decoding."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options import options
from megatron_async.cli.options.values import SEED, integer, several
from megatron_async.config.engine_config import MAX_DEPTH, EngineConfig
from megatron_async.errors import ConfigError
from megatron_async.verify.scenarios import (
    MAX_LENGTH,
    MAX_SCENARIO_DEPTH,
    MAX_TOKENS_IN_FLIGHT,
    TABLE,
    Scenario,
    Sizes,
)

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.verify.decode import Report

RANDOM = "random"
ALL = "all"
RANDOM_DESCRIPTION = (
    "a seeded workload of mixed prompt lengths, greedy and sampled, with more requests than rows"
)

_DESCRIPTION = """\
Decode requests at each depth and compare every token and finish reason with serial decoding,
without drafts.

The scenario 'random' is a seeded random workload: it mixes prompt lengths, greedy and sampled
requests, and has more requests than rows. The others are scripts that add, pause, evict and abort
requests while steps are in flight, share prefixes, run short of memory, suspend the engine or load
its weights again; each request must get the tokens that it gets alone and undisturbed. They bring
sizes of their own and run in batch-invariant mode. --list-scenarios lists them.

The exit status is 0 only when all are equal and each scenario really exercised what it is for; 1
when not.
"""

_NEAR_TIES = (
    "in 16 bits the sums of a row depend on the rows next to it, and near ties of its logits with "
    "them; --batch-invariant compares without that, --dtype float32 with far fewer ties"
)


def _depths(text: str) -> list[int]:
    depths: list[int] = several(integer(0, MAX_DEPTH))(text)
    if not any(depths):
        none = f"{text!r} has no depth above 0 to compare with serial decoding"
        raise argparse.ArgumentTypeError(f"{none}; use 0,1")
    return depths


def _scenarios(text: str) -> list[str]:
    known = [RANDOM, *(scenario.name for scenario in TABLE)]
    names: list[str] = []
    for name in text.split(","):
        if name != ALL and name not in known:
            there = f"there are {ALL}, {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"{name!r} is not a scenario; {there}")
        names += known if name == ALL else [name]
    return list(dict.fromkeys(names))


def add_command(commands: Any) -> None:
    """Add ``verify`` to the command line."""
    said = "check that asynchronous decoding gives the tokens of serial decoding"
    parser = commands.add_parser("verify", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run, takes_megatron_flags=True)
    add = parser.add_argument_group("workload and output").add_argument
    said = f"{RANDOM}, {ALL}, or names of --list-scenarios (default: {RANDOM})"
    add("--scenario", type=_scenarios, default=[RANDOM], metavar="NAME[,NAME]", help=said)
    said = "name and describe the scenarios, and end"
    add("--list-scenarios", action="store_true", help=said)
    said = f"requests of {RANDOM} (default: 24)"
    add("--requests", type=integer(1), default=24, metavar="N", help=said)
    said = "of prompts and sampling (default: 0)"
    add("--seed", type=SEED, default=0, metavar="S", help=said)
    said = "depths to compare with depth 0, which always runs (default: 0,1,2,4); scenarios other "
    said += f"than {RANDOM} are made for at most {MAX_SCENARIO_DEPTH}"
    add("--depths", type=_depths, default=[0, 1, 2, 4], metavar="D,D", help=said)
    add("--json", action="store_true", help="one JSON object on stdout instead of a table")
    options.add_model_options(parser)
    tokens = {"block_size_tokens": 16, "prefill_chunk_tokens": 32}
    options.add_engine_options(parser, max_requests=8, **tokens)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0 when all is equal and every witness was seen, else 1."""
    if args.list_scenarios:
        _list_scenarios()
        return 0
    scripted = [scenario for scenario in TABLE if scenario.name in args.scenario]
    if scripted and max(args.depths) > MAX_SCENARIO_DEPTH:
        limit = f"scenarios are made for depths of at most {MAX_SCENARIO_DEPTH}"
        way_out = f"lower it or use --scenario {RANDOM}"
        raise ConfigError(f"--depths {max(args.depths)}: {limit}; {way_out}")
    window = 1 + args.num_speculative_tokens
    if scripted and window > 1 and max(args.depths) * window > MAX_TOKENS_IN_FLIGHT:
        raise ConfigError(
            f"--depths {max(args.depths)}: scenarios are made for at most {MAX_TOKENS_IN_FLIGHT} "
            f"tokens in flight, and windows have {window} here; lower it or "
            f"--num-speculative-tokens, or use --scenario {RANDOM}"
        )
    configs = [options.engine_config(args, d) for d in dict.fromkeys((0, *args.depths))]
    reports = _verify(args, scripted, configs)
    only_random = args.scenario == [RANDOM]
    ok = all(report.ok for report in reports)
    if args.json:
        found = reports[0].to_dict()
        if not only_random:
            found = {"ok": ok, "scenarios": [report.to_dict() for report in reports]}
        print(json.dumps({"model": args.model, "seed": args.seed, **found}), flush=True)
    else:
        print(_random_table(reports[0]) if only_random else _scenario_table(reports), flush=True)
    for report in reports:
        for line in report.failures:
            print(line, file=sys.stderr)
    if not args.json:
        print("equal at every depth" if ok else "FAILED: see above", flush=True)
    return 0 if ok else 1


def _list_scenarios() -> None:
    names = {RANDOM: RANDOM_DESCRIPTION} | {s.name: s.description for s in TABLE}
    width = max(map(len, names))
    for name, description in names.items():
        print(f"{name:{width}}  {description}")


def _verify(
    args: argparse.Namespace, scripted: list[Scenario], configs: list[EngineConfig]
) -> list[Report]:
    """Load the model once and run what was asked for."""
    from megatron_async.cli.output.progress import progress_bar
    from megatron_async.verify.reference import scenario_config
    from megatron_async.verify.run import run_scenarios

    reports = []
    first = configs[0]
    if RANDOM not in args.scenario:
        first = scenario_config(first, Sizes(rows=1, blocks=MAX_LENGTH))
    with options.load_engine(args.model, first) as serial:
        if RANDOM in args.scenario:
            reports.append(_verify_random(args, serial, configs[1:]))
        runs = len(scripted) * len(configs)
        with progress_bar(shown=bool(runs), total=runs, desc="scenarios", unit="run") as bar:
            reports += run_scenarios(serial, scripted, configs, args.seed, bar.update)
    return reports


def _verify_random(
    args: argparse.Namespace, serial: DynamicInferenceEngine, configs: list[EngineConfig]
) -> Report:
    from megatron_async.verify.decode import Decoded, DepthReport, Report, decode
    from megatron_async.verify.reference import without_drafts
    from megatron_async.verify.workload import count_witnesses, make_workload

    works = make_workload(serial, args.requests, args.seed)
    config = serial.config
    if config.num_speculative_tokens:
        with serial.with_config(without_drafts(config)) as plain:
            reference = decode(plain, works)
        first = decode(serial, works)
    else:
        reference = first = decode(serial, works)

    def report(run: Decoded) -> DepthReport:
        seen = count_witnesses(run, args.block_size_tokens, args.prefill_chunk_tokens)
        missing = seen.missing(run.depth, args.inference_logging_step_interval)
        found = run.differences(reference), seen._asdict(), missing
        return DepthReport(run.depth, *found, run.counters, run.seconds)

    depths = [report(first)]
    for config in configs:
        with serial.with_config(config) as engine:
            depths.append(report(decode(engine, works)))
    advice = "" if args.batch_invariant or serial.cache.spec.dtype.itemsize > 2 else _NEAR_TIES
    return Report(RANDOM, RANDOM_DESCRIPTION, args.requests, depths, advice)


def _random_table(report: Report) -> str:
    from megatron_async.cli.output.table import format_columns

    depths = report.depths
    equal = [report.requests - len(depth.differences) for depth in depths]
    named = {
        "requests finished early": "finished_early",
        "tokens past the end, discarded": "discarded",
        "steps with requests waiting": "waited",
        "KV blocks crossed in decoding": "crossed_blocks",
        "prompts prefilled in chunks": "chunked_prefills",
    }
    rows: dict[str, list[Any]] = {
        "requests": [report.requests] * len(depths),
        "requests equal to depth 0": equal,
        "tokens committed": [depth.counters.tokens_committed for depth in depths],
        **{said: [depth.witnesses[name] for depth in depths] for said, name in named.items()},
        "steps": [depth.counters.steps_committed for depth in depths],
        "steps overlapped": [depth.counters.steps_overlapped for depth in depths],
        "seconds": [f"{depth.seconds:.2f}" for depth in depths],
    }
    return format_columns([f"depth {depth.depth}" for depth in depths], rows)


def _scenario_table(reports: list[Report]) -> str:
    """A line for each scenario; what was seen is that of the last depth."""
    from megatron_async.cli.output.table import format_table

    seen_at = f"seen at depth {reports[0].depths[-1].depth}"
    rows = [["scenario", "requests", "equal at depths", "overlapped", seen_at]]
    for report in reports:
        equal = [str(depth.depth) for depth in report.depths if not depth.differences]
        seen = [f"{name} {count}" for name, count in report.depths[-1].witnesses.items() if count]
        counters = [depth.counters for depth in report.depths if depth.depth]
        steps = max(sum(each.steps_committed for each in counters), 1)
        overlapped = f"{sum(each.steps_overlapped for each in counters) / steps:.0%}"
        row = [report.name, str(report.requests), ",".join(equal) or "none", overlapped]
        rows.append([*row, ", ".join(seen)])
    width = max(len(row[-1]) for row in rows)
    header, *lines = [[*row, last.ljust(width)] for *row, last in rows]
    return format_table(header, lines)
