"""What the size of a KV block costs and saves on this machine.

    python scripts/measure_block_sizes.py [--sizes N ...] [--rounds N] [--model tiny|PATH]

All sizes decode the same loads in turns, round by round, with fresh prompts in each: a full batch,
a long prompt, and short chats of several users, whose prompts begin with all that was said before.
On a CPU times are those of all threads together, so that other processes matter little.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.engine.stepping.drive import drive

ROWS, DECODE_PROMPT, DECODE_TOKENS = 8, 128, 64
LONG_PROMPT = 1024
USERS, TURNS, ANSWER_TOKENS = 20, 5, 24
SYSTEM_TOKENS, QUESTION_TOKENS = 24, (10, 60)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one engine did in one round.

    Attributes:
        step_ms: milliseconds of a decode step of all rows, the median.
        prefill_ms: milliseconds from a long prompt to its first token.
        chats_seconds: seconds of all chats.
        cached_share: tokens of their prompts that were in the prefix cache.
    """

    step_ms: float
    prefill_ms: float
    chats_seconds: float
    cached_share: float


class Measurement:
    """One engine; ``seed`` decides the prompts."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._vocabulary = engine.model.network.vocab_size
        is_cpu = engine.cache.device.type == "cpu"
        self._seconds = time.process_time if is_cpu else time.perf_counter

    def round(self, seed: int) -> Figures:
        """Each load once."""
        chance = random.Random(seed)
        step_ms = self._step_ms(chance)
        prefill_ms = self._prefill_ms(chance)
        return Figures(step_ms, prefill_ms, *self._chats(chance))

    def warm_up(self) -> None:
        """What the first steps of a process pay is no figure."""
        self._engine.generate([self._tokens(random.Random(0), DECODE_PROMPT)] * ROWS, _greedy(4))

    def _step_ms(self, chance: random.Random) -> float:
        params = _greedy(DECODE_TOKENS)
        for row in range(ROWS):
            self._engine.add_request(row, self._tokens(chance, DECODE_PROMPT), params)
        taken, before = [], self._seconds()
        for step in drive(self._engine):
            now = self._seconds()
            if len(step["tokens"]) == ROWS:
                taken.append(1e3 * (now - before))
            before = now
        return statistics.median(taken)

    def _prefill_ms(self, chance: random.Random) -> float:
        prompt = self._tokens(chance, LONG_PROMPT)
        started = self._seconds()
        self._engine.generate([prompt], _greedy(1))
        return 1e3 * (self._seconds() - started)

    def _chats(self, chance: random.Random) -> tuple[float, float]:
        system = self._tokens(chance, SYSTEM_TOKENS)
        chats = [list(system) for _ in range(USERS)]
        cached = asked = 0
        started = self._seconds()
        for _ in range(TURNS):
            for chat in chats:
                chat += self._tokens(chance, chance.randint(*QUESTION_TOKENS))
            for chat, done in zip(
                chats, self._engine.generate(chats, _greedy(ANSWER_TOKENS)), strict=True
            ):
                cached, asked = cached + done.num_cached_tokens, asked + done.prompt_length
                chat += done.generated_tokens
        return self._seconds() - started, cached / asked

    def _tokens(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(self._vocabulary) for _ in range(count)]


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=count, termination_id=-1)


def measure(model: str, sizes: list[int], rounds: int) -> Iterator[tuple[int, Figures]]:
    """The medians of each size."""
    found: dict[int, list[Figures]] = defaultdict(list)
    with contextlib.ExitStack() as opened:
        engines = {}
        for size in sizes:
            config = EngineConfig(depth=1, block_size_tokens=size)
            engine = DynamicInferenceEngine.from_pretrained(model, config)
            engines[size] = Measurement(opened.enter_context(engine))
            engines[size].warm_up()
        for number in range(rounds):
            order = sizes if number % 2 == 0 else sizes[::-1]
            for size in order:
                found[size].append(engines[size].round(number))
                print(f"round {number + 1}, blocks of {size}: {found[size][-1]}", file=sys.stderr)
    for size, each in found.items():
        names = Figures.__slots__
        yield size, Figures(*(statistics.median(getattr(f, name) for f in each) for name in names))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"| block | step of {ROWS} rows, ms | {LONG_PROMPT} tokens of prompt, ms |", end="")
    print(f" {USERS} users x {TURNS} turns, s | prompt tokens cached |\n|---|---|---|---|---|")
    for size, found in sorted(measure(args.model, args.sizes, args.rounds)):
        print(
            f"| {size} | {found.step_ms:.2f} | {found.prefill_ms:.0f} | {found.chats_seconds:.2f} |"
            f" {found.cached_share:.0%} |"
        )


if __name__ == "__main__":
    main()
