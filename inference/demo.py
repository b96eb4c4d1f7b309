"""``megatron-async demo``: the main job in one command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigError
from megatron_async.sampling_params import SamplingParams

from .options import (
    SEED,
    add_engine_options,
    add_model_options,
    add_scheduling_options,
    engine_config,
    integer,
    load_engine,
    resolve_scheduling,
)

if TYPE_CHECKING:
    from .decode import Decoded, Work

PROMPTS = (
    "def is_palindrome(text):",
    "class Stack:\n    def __init__(self):",
    "def read_lines(path):\n",
    "import os\nimport sys\n\n\ndef main(argv):",
)

_DESCRIPTION = """\
Generate text with asynchronous scheduling, streaming it to the terminal, then decode the same
requests serially and compare. The first of the four prompts is decoded greedily, the others are
sampled. The exit status is 0 only when all tokens are equal.
"""


def add_command(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="generate text with asynchronous scheduling and compare with serial decoding",
        description=_DESCRIPTION,
    )
    parser.set_defaults(run=run)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens",
        type=integer(1),
        default=320,
        metavar="N",
        help="tokens to generate at most for each prompt (default: 320)",
    )
    sampling.add_argument(
        "--seed", type=SEED, default=0, metavar="S", help="of the sampled prompts (default: 0)"
    )
    add_model_options(parser)
    add_scheduling_options(parser, default="on")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 if the tokens differ."""
    depth = resolve_scheduling(args.inference_async_scheduling, args.depth, default=True)
    config = engine_config(args, depth, random_seed=args.seed)
    serial_config = engine_config(args, 0, random_seed=args.seed)

    from .decode import Work, decode

    works = [
        Work(prompt, _params(number, args.max_new_tokens)) for number, prompt in enumerate(PROMPTS)
    ]
    warm_up = [Work(PROMPTS[0], SamplingParams(temperature=0.0, num_tokens_to_generate=4))]
    print(f"Loading model {args.model}.", flush=True)
    with load_engine(args.model, config) as engine:
        if engine.controller.tokenizer is None:
            raise ConfigError(
                f"--model {args.model} has no tokenizer, and the prompts of demo are text; use "
                "verify, which makes token ids of its own"
            )
        decode(engine, warm_up)
        print(f"Decoding {len(works)} prompts together, {_mode(depth)}.\n", flush=True)
        stream = OrderedStream(works)
        ours = decode(engine, works, on_text=stream.text, on_finish=stream.finish)
        print("\nDecoding the same prompts serially, depth 0.\n", flush=True)
        with engine.with_config(serial_config) as serial:
            decode(serial, warm_up)
            reference = decode(serial, works)
    differences = ours.differences(reference)
    _show_table(ours, reference)
    for line in differences:
        print(line)
    tokens = ours.counters.tokens_committed
    if differences:
        print(f"\nNOT EQUAL: {len(differences)} of {len(works)} requests differ.")
        return 1
    print(f"\nEqual: all {tokens} tokens of {len(works)} requests are the same.")
    return 0


def _params(number: int, max_new_tokens: int) -> SamplingParams:
    if number == 0:
        return SamplingParams(temperature=0.0, num_tokens_to_generate=max_new_tokens)
    return SamplingParams(temperature=0.7, top_p=0.9, num_tokens_to_generate=max_new_tokens)


def _mode(depth: int) -> str:
    return f"asynchronously, depth {depth}" if depth else "serially, depth 0"


class OrderedStream:
    """Streams several texts one after the other although they are decoded together: the first
    unfinished one is shown live, what the others have is shown when their turn comes."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works
        self._held = [""] * len(works)
        self._finished: set[int] = set()
        self._current = 0
        self._show_prompt()

    def text(self, number: int, text: str) -> None:
        """New text of a request."""
        if number == self._current:
            print(text, end="", flush=True)
        else:
            self._held[number] += text

    def finish(self, request: Any) -> None:
        """A request ended."""
        if request.generated_text is None:
            self.text(request.request_id, " ".join(map(str, request.generated_tokens)))
        self._finished.add(request.request_id)
        while self._current in self._finished:
            print("\n", flush=True)
            self._current += 1
            self._show_prompt()

    def _show_prompt(self) -> None:
        if self._current < len(self._works):
            number = self._current
            kind = "greedy" if self._works[number].params.greedy else "sampled"
            print(f"--- {number + 1} of {len(self._works)}, {kind} ---")
            print(self._works[number].prompt, end="")
            print(self._held[number], end="", flush=True)


def _show_table(ours: Decoded, reference: Decoded) -> None:
    from .table import format_table

    runs = (ours, reference)
    counters = [decoded.counters for decoded in runs]
    rows: list[list[object]] = [
        ["steps", *(c.steps_committed for c in counters)],
        ["rows launched", *(c.rows_launched for c in counters)],
        ["tokens committed", *(c.tokens_committed for c in counters)],
        ["tokens discarded", *(c.tokens_discarded for c in counters)],
        ["steps overlapped", *(c.steps_overlapped for c in counters)],
        ["overlap", *(f"{c.steps_overlapped / c.steps_committed:.1%}" for c in counters)],
        ["tokens/s", *(f"{d.counters.tokens_committed / d.seconds:.0f}" for d in runs)],
    ]
    header = ["", *(_mode(decoded.depth).replace(",", "") for decoded in runs)]
    print(format_table(header, rows))
