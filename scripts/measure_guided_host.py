"""Measure what the host does for a guided row in a step: masks along a window, and accepted tokens.

    python -m scripts.measure_guided_host [--tokenizer tokenizer.json] [--rows 1,32] [--threads 1]

Six schemas with windows of 4 tokens that conform, all accepted. Each step is repeated, and its
least time counts; a line has the medians of each schema, and the median of these, in us a row.
Without a tokenizer.json it is that of the embedded model.
"""

from __future__ import annotations

import argparse
import json
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

WINDOW, REPEATS = 4, 7


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.tokenizer is None:
        assets = Path(megatron_async.__file__).parent / "assets" / "tiny"
        tokenizer = Tokenizer.from_directory(assets)
    else:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(args.tokenizer)))
    size = tokenizer.vocab_size
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
