"""Measure what the host does for a guided row in a step: masks along a window, and accepted tokens.

    python -m scripts.measure_guided_host [--tokenizer tokenizer.json] [--rows 1,32] [--threads 1]
    python -m scripts.measure_guided_host --masks [--tokenizer tokenizer.json] [--vocabulary 151936]

Six schemas with windows of 4 tokens that conform, all accepted. Each step is repeated, and its
least time counts; a line has the medians of each schema, and the median of these, in us a row.
Without a tokenizer.json it is that of the embedded model.

With ``--masks`` the masks of one row: arguments of ten functions, drawn and tokenized, from the
first text of each grammar on; each step is timed by itself, and its least time of three passes
counts, each with grammars of its own. Windows have 4 drafts, of which 0 to 4 are right and the
others are tokens of other texts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import megatron_async
from megatron_async.grammar.compiler import CompiledGrammar, GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.windows import Window, WindowMasks
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.compare_grammars import SCHEMAS
from tests.support.guided_tokens import SCHEMAS as FUNCTIONS

WINDOW, REPEATS = 4, 7
TEXTS, DRAFTS, PASSES = 10, 4, 3
"""Arguments of each function whose masks are timed, drafts of a window, and how often."""
WORDS = ["meeting", "about", "the", "new", "Büro,", "Berlin", "東京", "on", "Monday", "Zoë", "&"]


def steps(
    grammar: CompiledGrammar, ids: list[int], rows: int, maker: WindowMasks, vocab_size: int,
    *, guesses: bool,
) -> Iterator[float]:  # fmt: skip
    """Microseconds of a row in each step along a text."""
    masks: Any = np.zeros((rows, WINDOW, -(-vocab_size // 32)), np.int32)
    masked: Any = np.zeros((rows, WINDOW), np.int32)
    texts = [grammar.matcher() for _ in range(rows)]
    for at in range(0, len(ids), WINDOW):
        drafts = ids[at : at + WINDOW - 1]
        started = time.perf_counter()
        given = zip(texts, masks, masked, strict=True)
        maker.fill([Window(text, drafts, mask, each, guesses) for text, mask, each in given])
        for text in texts:
            assert all(text.accept(token) for token in ids[at : at + WINDOW])
        yield (time.perf_counter() - started) * 1e6 / rows


def drawn(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value of a function's schema."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {name: drawn(each, rng) for name, each in schema["properties"].items()}
        case "array":
            return [drawn(schema["items"], rng) for _ in range(schema["maxItems"])]
        case "string" if schema.get("format") == "date":
            return f"2026-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"
        case "string" if schema.get("format") == "date-time":
            return f"2026-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}T0{rng.randint(0, 9)}:30:00Z"
        case "string":
            return " ".join(rng.sample(WORDS, rng.randint(1, 4)))[: schema["maxLength"]]
        case "boolean":
            return rng.random() < 0.5
        case kind:
            value = rng.randint(max(schema["minimum"], -90), schema["maximum"])
            return value / 2 if kind == "number" else value


def windows_along(
    ids: list[int], others: list[int], rng: random.Random, most: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Drafts of each step along a text, and the tokens that it brings."""
    at = 0
    while at < len(ids):
        right = ids[at : at + rng.randint(0, most)]
        wrong = [rng.choice(others) for _ in range(most - len(right))]
        drafts = right + wrong
        count = 0
        while count < most and at + count < len(ids) and drafts[count] == ids[at + count]:
            count += 1
        yield drafts, ids[at : at + count + 1]
        at += count + 1


def times_of_masks(
    compiler: GrammarCompiler, tokenizer: Tokenizer, size: int, most: int, *, guesses: bool
) -> list[float]:
    """Microseconds of each step of one row."""
    rng, maker, found = random.Random(0), WindowMasks(size, 1), []
    masks: Any = np.zeros((1 + most, -(-size // 32)), np.int32)
    masked: Any = np.zeros(1 + most, np.int32)
    for schema in FUNCTIONS.values():
        spec = StructuredOutputs(json=schema, disable_any_whitespace=True)
        grammar, others = compiler.compile(spec), tokenizer.tokenize(json.dumps(WORDS))
        for _ in range(TEXTS):
            value = json.dumps(drawn(schema, rng), ensure_ascii=False, separators=(",", ":"))
            text = grammar.matcher()
            for drafts, tokens in windows_along(tokenizer.tokenize(value), others, rng, most):
                masked.fill(0)
                started = time.perf_counter_ns()
                maker.fill([Window(text, drafts, masks, masked, guesses)])
                found.append((time.perf_counter_ns() - started) / 1e3)
                assert all(text.accept(token) for token in tokens), value
    return found


def print_masks(tokenizer: Tokenizer, size: int) -> None:
    """A line for each way."""
    print("| ids | a row has | steps | p50 | p99 | max |\n|---|---|---|---|---|---|")
    for name, most, guesses in (
        ("one mask", 0, False), ("a window of 4 drafts", DRAFTS, False),
        ("the same, and what is forced", DRAFTS, True),
    ):  # fmt: skip
        passes = [
            times_of_masks(GrammarCompiler(tokenizer, size), tokenizer, size, most, guesses=guesses)
            for _ in range(PASSES)
        ]
        times = [*map(min, zip(*passes, strict=True))]
        p50, p99 = np.percentile(times, (50, 99))
        print(f"| {size:,} | {name} | {len(times):,} | {p50:.0f} | {p99:.0f} | {max(times):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--masks", action="store_true", help="p50, p99 and max of one row's masks")
    parser.add_argument("--vocabulary", type=int, help="of the model, if it is larger")
    args = parser.parse_args()
    if args.tokenizer is None:
        assets = Path(megatron_async.__file__).parent / "assets" / "tiny"
        tokenizer = Tokenizer.from_directory(assets)
    else:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(args.tokenizer)))
    size = max(tokenizer.vocab_size, args.vocabulary or 0)
    if args.masks:
        print_masks(tokenizer, size)
        return
    compiler, maker = GrammarCompiler(tokenizer, size), WindowMasks(size, args.threads)
    for rows in map(int, args.rows.split(",")):
        for guesses in (False, True):
            medians = []
            for schema, instance in SCHEMAS.values():
                grammar = compiler.compile(StructuredOutputs(json=schema))
                ids = tokenizer.tokenize(json.dumps(instance, ensure_ascii=False))
                runs = [
                    [*steps(grammar, ids, rows, maker, size, guesses=guesses)]
                    for _ in range(REPEATS if rows == 1 else 3)
                ]
                medians.append(statistics.median(map(min, zip(*runs, strict=True))))
            print(f"{size} ids, {rows} rows, forced {guesses}: {statistics.median(medians):.0f} us "
                  f"({', '.join(f'{each:.0f}' for each in medians)})")  # fmt: skip


if __name__ == "__main__":
    main()
