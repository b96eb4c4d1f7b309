"""Tokens/s of structured outputs without drafts and with them.

    python -m scripts.bench_guided_drafts [--model tiny] [--drafts 4] [--rounds 3] [--depth 1]
    python -m scripts.bench_guided_drafts --automata --depth 2

Arguments of ten functions, half of them greedily and half at temperature 1, one after the other and
all at once; prompts are in the time. Rounds alternate between ways to draft; figures are medians.
All ways must give the same tokens. With ``--automata`` each way comes with token automata too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack

from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from tests.support.guided_tokens import SCHEMAS

WAYS = ("none", "grammar", "ngram")
AUTOMATA = " and automata"
AUTOMATA_BYTES = 256 << 20
MOST, LENGTH = 20, 200


def config_of(args: argparse.Namespace, way: str) -> EngineConfig:
    method = way.removesuffix(AUTOMATA)
    drafts = {} if method == "none" else {"speculative_method": method}
    return EngineConfig(
        depth=args.depth,
        num_speculative_tokens=args.drafts if drafts else 0,
        max_requests=MOST,
        max_sequence_length=512,
        block_count=MOST * 40,
        block_size_tokens=16,
        batch_invariant=True,
        guided_automata_bytes=AUTOMATA_BYTES if way.endswith(AUTOMATA) else 0,
        testing=TestingOptions(automata_at_once=True),
        **drafts,  # type: ignore[arg-type]
    )


def asked() -> tuple[list[str], list[SamplingParams]]:
    params = [
        SamplingParams(
            temperature=temperature, seed=7, num_tokens_to_generate=LENGTH,
            structured_outputs={"json": schema, "disable_any_whitespace": True},
        )
        for schema in SCHEMAS.values()
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    return [f"# arguments of {name}\n" for name in SCHEMAS for _ in range(2)], params


def measured(engine: DynamicInferenceEngine, *, at_once: bool) -> tuple[list[list[int]], float]:
    """Tokens by request, and tokens/s."""
    prompts, params = asked()
    started, requests = time.perf_counter(), []
    if at_once:
        requests = engine.generate(prompts, params)
    else:
        for prompt, one in zip(prompts, params, strict=True):
            requests += engine.generate([prompt], one)
    seconds = time.perf_counter() - started
    tokens = [request.generated_tokens for request in requests]
    return tokens, sum(map(len, tokens)) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="tiny", help="a name or a directory")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1)
    said = "compare token automata too"
    parser.add_argument("--automata", action="store_true", help=said)
    args = parser.parse_args()
    ways = (*WAYS, *(way + AUTOMATA for way in WAYS)) if args.automata else WAYS
    rates: dict[tuple[bool, str], list[float]] = {}
    with ExitStack() as stack:
        first = DynamicInferenceEngine.from_pretrained(args.model, config_of(args, WAYS[0]))
        engines = {WAYS[0]: stack.enter_context(first)}
        for way in ways[1:]:
            engines[way] = stack.enter_context(first.with_config(config_of(args, way)))
        expected: list[list[int]] = []
        for number in range(args.rounds + 1):
            for at_once in (False, True):
                for way, engine in engines.items():
                    tokens, rate = measured(engine, at_once=at_once)
                    expected = expected or tokens
                    assert tokens == expected, f"{way}: other tokens"
                    if number:  # behind a warm-up
                        rates.setdefault((at_once, way), []).append(rate)
    for way, engine in engines.items():
        if way.endswith(AUTOMATA) and engine.counters.host_masks:
            print(f"{way}: rows without an automaton: {dict(engine.counters.host_masks)}")
    print("| requests | drafts by | tokens/s | times |\n|---|---|---|---|")
    for (at_once, way), each in rates.items():
        rate, plain = statistics.median(each), statistics.median(rates[at_once, WAYS[0]])
        print(f"| {MOST if at_once else 1} at once | {way} | {rate:,.0f} | {rate / plain:.2f} |")


if __name__ == "__main__":
    main()
