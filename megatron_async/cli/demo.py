"""``megatron-async demo``: the main job in one command."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options import options
from megatron_async.cli.options.values import SEED, integer
from megatron_async.errors import ConfigError
from megatron_async.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.verify.decode import Decoded

PROMPTS = (
    "def is_palindrome(text):",
    "class Stack:\n    def __init__(self):",
    "def read_lines(path):\n",
    "import os\nimport sys\n\n\ndef main(argv):",
)

_DESCRIPTION = """\
Generate text with asynchronous scheduling, streaming it to the terminal, then decode the same
requests serially and compare. The first of the four prompts is decoded greedily, the others are
sampled. A model with layers for multi-token prediction decodes them once more with drafts. The exit
status is 0 only when all tokens are equal.
"""


def add_command(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    said = "generate text with asynchronous scheduling and compare with serial decoding"
    parser = commands.add_parser("demo", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=integer(1), default=320, metavar="N", help="default: 320")
    add("--seed", type=SEED, default=0, metavar="S", help="of the samples (default: 0)")
    options.add_model_options(parser)
    options.add_scheduling_options(parser, default="on")
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 if the tokens differ."""
    depth = options.resolve_scheduling(args.inference_async_scheduling, args.depth, default=True)
    config = options.engine_config(args, depth, random_seed=args.seed)
    serial_config = options.engine_config(args, 0, random_seed=args.seed)

    from megatron_async.cli.output.writers import InTurnWriter
    from megatron_async.verify.decode import Work, decode

    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=args.max_new_tokens)
    sampled = dataclasses.replace(greedy, temperature=0.7, top_p=0.9)
    works = [Work(prompt, sampled if n else greedy) for n, prompt in enumerate(PROMPTS)]
    heads = [
        f"--- {n} of {len(works)}, {'sampled' if n > 1 else 'greedy'} ---\n{prompt}"
        for n, prompt in enumerate(PROMPTS, 1)
    ]
    warm_up = [works[0].changed(num_tokens_to_generate=4)]
    print(f"Loading model {args.model}.", flush=True)
    with options.load_engine(args.model, config) as engine:
        if engine.model.tokenizer is None:
            none = f"--model {args.model} has no tokenizer, and the prompts of demo are text"
            raise ConfigError(f"{none}; use verify, which makes token ids of its own")
        decode(engine, warm_up)
        print(f"Decoding {len(works)} prompts together, {_mode(depth)}.\n", flush=True)
        ours = decode(engine, works, InTurnWriter(heads))
        print("\nDecoding the same prompts serially, depth 0.\n", flush=True)
        with engine.with_config(serial_config) as serial:
            decode(serial, warm_up)
            reference = decode(serial, works)
        runs = {_mode(depth): ours, _mode(0): reference}
        layers = engine.model.network.mtp_layers
        if layers and not config.num_speculative_tokens:
            print(f"Decoding them with {layers} drafts a step, {_mode(depth)}.\n", flush=True)
            drafting_config = dataclasses.replace(config, num_speculative_tokens=layers)
            with engine.with_config(drafting_config) as drafting:
                decode(drafting, warm_up)
                runs["with drafts"] = decode(drafting, works)
    _show_table(runs)
    differences = [line for run in runs.values() for line in run.differences(reference)]
    for line in differences:
        print(line)
    if differences:
        print(f"\nNOT EQUAL: {len(differences)} of {len(works) * (len(runs) - 1)} requests differ.")
        return 1
    tokens = ours.counters.tokens_committed
    print(f"\nEqual: all {tokens} tokens of {len(works)} requests are the same.")
    return 0


def _mode(depth: int) -> str:
    return f"asynchronously, depth {depth}" if depth else "serially, depth 0"


def _show_table(runs: dict[str, Decoded]) -> None:
    from megatron_async.cli.output.table import format_columns

    counters = [decoded.counters for decoded in runs.values()]
    rows: dict[str, list[object]] = {
        "steps": [c.steps_committed for c in counters],
        "rows launched": [c.rows_launched for c in counters],
        "tokens committed": [c.tokens_committed for c in counters],
        "drafts accepted": [f"{c.tokens_accepted} of {c.tokens_drafted}" for c in counters],
        "by position": ["/".join(f"{s:.0%}" for s in c.acceptance) or "-" for c in counters],
        "tokens a row and step": [f"{c.tokens_per_row:.2f}" for c in counters],
        "tokens discarded": [c.tokens_discarded for c in counters],
        "steps overlapped": [c.steps_overlapped for c in counters],
        "overlap": [f"{c.steps_overlapped / c.steps_committed:.1%}" for c in counters],
        "tokens/s": [f"{run.counters.tokens_committed / run.seconds:.0f}" for run in runs.values()],
    }
    print(format_columns([mode.replace(",", "") for mode in runs], rows))
