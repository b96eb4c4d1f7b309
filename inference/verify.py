"""``megatron-async verify``: asynchronous decoding gives the tokens of serial decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from megatron_async.config import MAX_DEPTH

from .options import (
    SEED,
    add_engine_options,
    add_model_options,
    engine_config,
    integer,
    load_engine,
)

if TYPE_CHECKING:
    from .decode import Decoded
    from .workload import Witnesses

_DESCRIPTION = """\
Decode a seeded random workload at each depth and compare every token and finish reason with
depth 0, serial decoding. The workload mixes prompt lengths, greedy and sampled requests, and has
more requests than slots.

The exit status is 0 only when all are equal and the workload really exercised what it is for; 1
when not.
"""


def _depths(text: str) -> list[int]:
    convert = integer(0, MAX_DEPTH)
    depths = list(dict.fromkeys(convert(part) for part in text.split(",")))
    if not any(depths):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no depth above 0 to compare with serial decoding; use 0,1"
        )
    return depths


def add_command(commands: Any) -> None:
    """Add ``verify`` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check that asynchronous decoding gives the tokens of serial decoding",
        description=_DESCRIPTION,
    )
    parser.set_defaults(run=run)
    workload = parser.add_argument_group("workload and output")
    workload.add_argument(
        "--requests", type=integer(1), default=24, metavar="N", help="requests (default: 24)"
    )
    workload.add_argument(
        "--seed", type=SEED, default=0, metavar="S", help="of the workload (default: 0)"
    )
    workload.add_argument(
        "--depths",
        type=_depths,
        default=[0, 1, 2, 4],
        metavar="D,D",
        help="depths to compare with depth 0, which always runs (default: 0,1,2,4)",
    )
    workload.add_argument(
        "--json", action="store_true", help="one JSON object on stdout instead of a table"
    )
    add_model_options(parser)
    add_engine_options(parser, max_requests=8, block_size=16, prefill_chunk_tokens=32)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0 when all is equal and every witness was seen, else 1."""
    serial_config = engine_config(args, 0)
    configs = {depth: engine_config(args, depth) for depth in args.depths if depth}

    from .decode import decode
    from .workload import count_witnesses, make_workload

    with load_engine(args.model, serial_config) as serial:
        works = make_workload(serial, args.requests, args.seed)
        runs = [decode(serial, works)]
        for config in configs.values():
            with serial.with_config(config) as engine:
                runs.append(decode(engine, works))
    sizes = (args.block_size_tokens, args.prefill_chunk_tokens)
    witnesses = [count_witnesses(decoded, *sizes) for decoded in runs]
    differences = [decoded.differences(runs[0]) for decoded in runs]
    missing = [
        f"depth {decoded.depth}: {line}"
        for decoded, seen in zip(runs, witnesses, strict=True)
        for line in seen.missing(decoded.depth)
    ]
    show = _show_json if args.json else _show_table
    show(args, runs, witnesses, differences)
    for line in (*(line for lines in differences for line in lines), *missing):
        print(line, file=sys.stderr)
    ok = not missing and not any(differences)
    if not args.json:
        print("equal at every depth" if ok else "FAILED: see above", flush=True)
    return 0 if ok else 1


def _show_table(
    args: argparse.Namespace,
    runs: list[Decoded],
    witnesses: list[Witnesses],
    differences: list[list[str]],
) -> None:
    from .table import format_table

    header = ["", *(f"depth {decoded.depth}" for decoded in runs)]
    counters = [decoded.counters for decoded in runs]
    rows: list[list[object]] = [
        ["requests", *(len(decoded.requests) for decoded in runs)],
        ["requests equal to depth 0", *(args.requests - len(lines) for lines in differences)],
        ["tokens committed", *(c.tokens_committed for c in counters)],
        ["requests finished early", *(w.finished_early for w in witnesses)],
        ["tokens past the end, discarded", *(w.discarded for w in witnesses)],
        ["steps with requests waiting", *(w.waited for w in witnesses)],
        ["KV blocks crossed in decoding", *(w.crossed_blocks for w in witnesses)],
        ["prompts prefilled in chunks", *(w.chunked_prefills for w in witnesses)],
        ["steps", *(c.steps_committed for c in counters)],
        ["steps overlapped", *(c.steps_overlapped for c in counters)],
        ["seconds", *(f"{decoded.seconds:.2f}" for decoded in runs)],
    ]
    print(format_table(header, rows), flush=True)


def _show_json(
    args: argparse.Namespace,
    runs: list[Decoded],
    witnesses: list[Witnesses],
    differences: list[list[str]],
) -> None:
    depths = [
        {
            "depth": decoded.depth,
            "equal": not lines,
            "differences": lines,
            "witnesses": dataclasses.asdict(seen),
            "missing": seen.missing(decoded.depth),
            "counters": decoded.counters.to_dict(),
            "seconds": decoded.seconds,
        }
        for decoded, seen, lines in zip(runs, witnesses, differences, strict=True)
    ]
    ok = all(entry["equal"] and not entry["missing"] for entry in depths)
    report = {
        "model": args.model,
        "requests": args.requests,
        "seed": args.seed,
        "ok": ok,
        "depths": depths,
    }
    print(json.dumps(report), flush=True)
