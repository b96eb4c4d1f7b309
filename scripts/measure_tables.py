"""How late a thread gets its turn while tables of grammars are made.

    python -m scripts.measure_tables --tokenizer DIRECTORY [--vocabulary 151936]

The thread wants it each 0.1 ms, as one that steps an engine does. Beside it nothing happens, or the
tables of ten functions are made: in the background, from the start of the process that makes them
on, or in a thread, as where a request is added. The last figure is how long all tables took.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.tables import background
from megatron_async.grammar.tables.kept import KeptAutomata
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.guided_tokens import SCHEMAS

BUDGET = 1 << 30
PERIOD_NS = 100_000


class Lateness:
    """Measures in a thread of its own."""

    def __init__(self) -> None:
        self.late: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter_ns()
            time.sleep(PERIOD_NS / 1e9)
            self.late.append(time.perf_counter_ns() - began - PERIOD_NS)

    def end(self) -> str:
        """Ends the thread; median, p99, p99.9 and most in ms."""
        self._over.set()
        self._thread.join()
        late = sorted(self.late)
        shares = (0.5, 0.99, 0.999, 1.0)
        at = [late[min(int(share * len(late)), len(late) - 1)] / 1e6 for share in shares]
        return " | ".join(f"{each:.2f}" for each in at)


def nothing(compiler: GrammarCompiler, specs: list[StructuredOutputs]) -> None:
    time.sleep(3)


def in_the_background(compiler: GrammarCompiler, specs: list[StructuredOutputs]) -> None:
    kept = KeptAutomata(BUDGET)
    background.make_in_background(kept, compiler, BUDGET)
    for spec in (*specs, *specs):
        kept.wanted(spec, compiler.compile(spec))
    while not all(kept.find(spec) for spec in specs):
        time.sleep(0.1)
    kept.close()


def in_a_thread(compiler: GrammarCompiler, specs: list[StructuredOutputs]) -> None:
    kept = KeptAutomata(BUDGET)
    for spec in specs:
        kept.of(spec, compiler.compile(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory")
    parser.add_argument("--vocabulary", type=int, help="ids of the model")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_directory(args.tokenizer)
    compiler = GrammarCompiler(tokenizer, args.vocabulary or tokenizer.vocab_size)
    specs = [StructuredOutputs(json=schema) for schema in SCHEMAS.values()]
    for spec in specs:
        compiler.compile(spec)
    ways: tuple[Callable[[GrammarCompiler, list[StructuredOutputs]], None], ...]
    ways = nothing, in_the_background, in_a_thread
    print("| beside it | p50, ms | p99 | p99.9 | most | s |\n|---|---|---|---|---|---|")
    for way in ways:
        lateness, began = Lateness(), time.perf_counter()
        way(compiler, specs)
        seconds = time.perf_counter() - began
        print(
            f"| {way.__name__.replace('_', ' ')} | {lateness.end()} | {seconds:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
