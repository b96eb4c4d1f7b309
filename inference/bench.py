"""``megatron-async bench``: milliseconds of a decode step, serial and asynchronous."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_async.config import MAX_DEPTH
from megatron_async.errors import ConfigError

from .options import PROGRAM, SEED, integer, number

SHAPE_NAMES = ("llama8b", "qwen0.6b", "gpt2", "tiny-llama")

_DESCRIPTION = """\
Measure decode steps: greedy, no end tokens, prompts of random token ids. Every depth decodes the
same load on the same weights; rounds alternate between the depths, and depth 0, serial decoding,
is the baseline. On a GPU a profiler then shows how long the device waits between steps.
What the columns mean: docs/performance.md.
"""


def _numbers(low: int, high: int | None = None) -> Callable[[str], list[int]]:
    convert = integer(low, high)

    def split(text: str) -> list[int]:
        return list(dict.fromkeys(convert(part) for part in text.split(",")))

    return split


def add_command(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench", help="measure decode steps at several depths", description=_DESCRIPTION
    )
    parser.set_defaults(run=run)
    model = parser.add_argument_group("model").add_mutually_exclusive_group()
    model.add_argument("--model", metavar="tiny|PATH", help="a model (default: tiny)")
    model.add_argument(
        "--shape", choices=SHAPE_NAMES, help="random weights in the shape of a known model"
    )
    add = parser.add_argument_group("measurement").add_argument
    add("--batch-sizes", type=_numbers(1), default=[1], metavar="B,...", help="default: 1")
    add(
        "--depths",
        type=_numbers(0, MAX_DEPTH),
        default=[0, 1],
        metavar="D,...",
        help="steps in flight; 0 is serial (default: 0,1)",
    )
    add("--prompt-tokens", type=integer(1), default=128, metavar="N", help="default: 128")
    add("--new-tokens", type=integer(1), default=512, metavar="N", help="default: 512")
    add("--rounds", type=integer(1), default=3, metavar="N", help="per depth (default: 3)")
    add("--host-work-us", type=number(0), default=0.0, metavar="N", help="spin in each commit")
    add("--stall-us", type=number(0), default=0.0, metavar="N", help="spin in every K-th commit")
    add("--stall-every", type=integer(1), metavar="K", help="see --stall-us")
    add("--seed", type=SEED, default=0, metavar="S", help="of weights and prompts (default: 0)")
    add("--device", metavar="NAME", help="default: a GPU where there is one")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16 on a GPU for a shape, the checkpoint's for a model; float32 on a "
        "CPU",
    )
    add(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU: profile some steps after the timed rounds",
    )
    add("--baseline", choices=("transformers",), help="measure its generate on the same shape")
    add("--json", metavar="FILE|-", help="write the report; - is stdout, the table to stderr then")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if bool(args.stall_us) != (args.stall_every is not None):
        raise ConfigError("--stall-us and --stall-every belong together; give both or neither")
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: its directory does not exist; create it first")
    from .bench_engine import Load, least_new_tokens
    from .bench_report import as_table
    from .bench_run import collect

    least = least_new_tokens(args.depths)
    if args.new_tokens < least:
        raise ConfigError(
            f"--new-tokens {args.new_tokens} leaves no steady steps at depth {max(args.depths)}; "
            f"use at least {least}"
        )
    load = Load(
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        host_work_us=args.host_work_us,
        stall_us=args.stall_us,
        stall_every=args.stall_every or 0,
        seed=args.seed,
    )
    report = collect(args, load, command_line(args))

    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text)
    print(as_table(report), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


def command_line(args: argparse.Namespace) -> str:
    """The command that measures the same again, every option written out."""
    words = [PROGRAM, "bench"]
    for name, value in vars(args).items():
        if name in ("run", "json") or value is None or value is False:
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [option, ",".join(map(str, value))]
        else:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    if not args.profile:
        words.append("--no-profile")
    return shlex.join(words)
