"""Compare the ways of guided rows: in each step, sitting launches out, and by token automata.

    python -m scripts.bench_guided [--model tiny] [--depths 1,2] [--guided 0,1,8,32] [--rounds 5]
    python -m scripts.bench_guided --model random:llama8b --rounds 2    # on a GPU: about a minute
    python -m scripts.bench_guided --model random:llama8b --tokenizer DIRECTORY --automata

Of 32 rows some have ten function schemas in turn, in arrays that never end, and no drafts; the
others are sampled at temperature 1 too. With ``--automata`` they have ten regular expressions that
never end, whose tables fit, and the third way is compared too. A line has medians of the rounds,
which alternate between ways and depths: ms of a step, tokens/s of guided rows and of the others,
and the shares of steps that overlapped and of launches that a guided row was left out of.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

from megatron_async.config.engine_config import GUIDED_ROWS, EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import GuidedRow
from megatron_async.sampling_params import SamplingParams
from tests.support.guided_tokens import SCHEMAS

ROWS, WARMUP, BLOCK = 32, 20, 16
MANY = 500
AUTOMATA = "automata"
"""A way beside those of ``guided_rows``."""
AUTOMATA_BYTES = 256 << 20
NAMES = ("city", "date", "user", "query", "path", "unit", "topic", "state", "title", "color")
EXPRESSIONS = tuple(
    rf'(\{{"{name}": "[A-Za-z ]{{1,{12 + 3 * number}}}", "n": -?[0-9]{{1,6}}\}}\n)*'
    for number, name in enumerate(NAMES)
)
"""Texts of lines, each an object. They may always go on."""


class Figures(NamedTuple):
    """What a round gave."""

    ms: float
    guided: float
    others: float
    overlapped: float
    left_out: float


def config_of(args: argparse.Namespace, way: str, depth: int) -> EngineConfig:
    # A row has at most a token in each step.
    length = args.prompt + args.steps + WARMUP + 80
    return EngineConfig(
        depth=depth,
        guided_rows=GUIDED_ROWS[0] if way == AUTOMATA else way,
        guided_automata_bytes=AUTOMATA_BYTES if way == AUTOMATA else 0,
        testing=TestingOptions(automata_at_once=True),
        tokenizer_model=args.tokenizer,
        max_requests=ROWS,
        max_sequence_length=length,
        block_size_tokens=BLOCK,
        block_count=ROWS * (2 + length // BLOCK),
        num_cuda_graphs=args.graphs,
        capture_mixed_steps=False,
        enable_prefix_caching=False,
    )


def asked(number: int, guided: int, length: int, *, automata: bool) -> SamplingParams:
    """A row's parameters; ``guided`` rows, spread evenly over all, have a schema, or an
    expression."""
    outputs: dict[str, Any] | None = None
    if (number * guided) % ROWS < guided and automata:
        outputs = {"regex": EXPRESSIONS[number % len(EXPRESSIONS)]}
    elif (number * guided) % ROWS < guided:
        items = list(SCHEMAS.values())[number % len(SCHEMAS)]
        endless = {"type": "array", "items": items, "minItems": MANY}
        outputs = {"json": endless, "disable_any_whitespace": True}
    return SamplingParams(
        temperature=1.0, seed=number, num_tokens_to_generate=length, termination_id=-1,
        structured_outputs=outputs,
    )  # fmt: skip


def measured(engine: DynamicInferenceEngine, guided: int, args: argparse.Namespace) -> Figures:
    """Add all rows, and take the time of steps behind the first ones."""
    length = args.steps + WARMUP + 60
    for number in range(ROWS):
        prompt: Any = [(17 * number + place) % 200 + 3 for place in range(args.prompt)]
        params = asked(number, guided, length, automata=args.automata)
        engine.add_request(number, prompt, params)
    counters = engine.counters
    while engine.scheduler.waiting_count or counters.tokens_committed < ROWS:
        engine.step_modern()
    begun = counters.steps_committed
    while counters.steps_committed < begun + WARMUP:
        engine.step_modern()
    before, started = counters.to_dict(), time.perf_counter()
    while counters.steps_committed < before["steps_committed"] + args.steps:
        engine.step_modern()
    seconds, after = time.perf_counter() - started, counters.to_dict()
    assert engine.scheduler.unfinished_count == ROWS, "a row has ended"

    def more(name: str) -> int:
        return int(after[name]) - int(before[name])

    def rows(way: GuidedRow) -> int:
        return int(after["guided_rows"].get(way.value, 0) - before["guided_rows"].get(way.value, 0))

    automata = rows(GuidedRow.AUTOMATON)
    steps, tokens = more("steps_committed"), rows(GuidedRow.TOKEN) + automata
    if engine.config.guided_automata_bytes and automata < tokens:
        print("some rows had no automaton:", after["host_masks"])
    figures = Figures(
        seconds / steps * 1e3,
        tokens / seconds,
        (more("tokens_committed") - tokens) / seconds,
        more("steps_overlapped") / steps,
        rows(GuidedRow.SAT_OUT) / max(guided * steps, 1),
    )
    engine.reset()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="tiny", help="a name, a directory or random:SHAPE")
    parser.add_argument("--tokenizer", help="a tokenizer.json, in place of the model's own")
    parser.add_argument("--depths", default="1,2")
    parser.add_argument("--guided", default="0,1,8,32", help="guided rows of 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of a round")
    parser.add_argument("--graphs", type=int, default=2, help="numbers of rows with graphs")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    said = "compare token automata too, of expressions"
    parser.add_argument("--automata", action="store_true", help=said)
    args = parser.parse_args()
    depths, counts = ([int(n) for n in each.split(",")] for each in (args.depths, args.guided))
    ways = (*GUIDED_ROWS, AUTOMATA) if args.automata else GUIDED_ROWS
    found: dict[tuple[int, str, int], list[Figures]] = {}
    with ExitStack() as stack:
        engines: dict[tuple[str, int], DynamicInferenceEngine] = {}
        for way, depth in product(ways, depths):
            config = config_of(args, way, depth)
            if not engines:
                made = DynamicInferenceEngine.from_pretrained(args.model, config)
            else:
                made = next(iter(engines.values())).with_config(config)
            engines[way, depth] = stack.enter_context(made)
        for number, count in product(range(args.rounds), counts):
            # The other way round in each second round.
            for (way, depth), engine in list(engines.items())[:: 1 - number % 2 * 2]:
                figures = measured(engine, count, args)
                found.setdefault((count, way, depth), []).append(figures)
    print("| guided rows | depth | way | ms/step | guided tokens/s | other tokens/s | overlapped "
          "| left out |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for count, depth, way in product(counts, depths, ways):
        ms, guided, others, overlapped, left_out = (
            statistics.median(each) for each in zip(*found[count, way, depth], strict=True)
        )
        print(f"| {count} | {depth} | {way} | {ms:.3f} | {guided:,.0f} | {others:,.0f} | "
              f"{overlapped:.0%} | {left_out:.0%} |")  # fmt: skip


if __name__ == "__main__":
    main()
