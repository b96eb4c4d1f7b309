"""What batch-invariant kernels and exact numerics cost: the table of ``docs/rl.md``.

    python -m scripts.bench_invariance --model random:llama8b --batch-sizes 1,32,64,128,256
    python -m scripts.bench_invariance --model tiny --batch-sizes 1,8 --prefill 2x64 --train 2x64
    python -m scripts.bench_invariance --model random:llama8b --batch-sizes 32 --profile
    python -m scripts.bench_invariance --table --seconds 200

``--table`` measures all of :data:`TABLE` on a GPU, and on a CPU the same of small models; each line
is printed as soon as it is there, and none is begun after ``--seconds``.

Decode steps are greedy, at depth 1. Prefill is the time until all prompts have their first token. A
trainer's step is forward and backward of all tokens, without an optimizer. Rounds alternate between
the two ways; figures are medians. ``--profile`` says which kernels a decode step has, and with
``--prefill`` a prefill; ``--products`` what products of Llama-8B take with each tile
(``scripts/profile_invariance.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.models.build import build_random_model
from megatron_async.models.description.shapes import SHAPES
from megatron_async.training import exact_numerics
from scripts import profile_invariance

WARMUP, BLOCK = 20, 64
WAYS = (False, True)
"""Whether kernels are batch-invariant."""
Size = tuple[int, int]
"""Prompts or sequences, and the tokens of each."""


class Rows(NamedTuple):
    """Lines of a table of one model.

    Args:
        model: as ``--model``; of ``random:SHAPE`` with ``layers`` that many alone.
        train, prefill: sizes; None leaves the line out.
        decode: rows of steps.
    """

    model: str
    train: Size | None = None
    prefill: Size | None = None
    decode: tuple[int, ...] = ()
    layers: int | None = None


TABLE = (
    Rows("random:qwen0.6b", (4, 2048), (4, 4096), (32, 256, 1, 8, 64, 128)),
    Rows("random:llama8b", (4, 2048), layers=4),
    Rows("random:llama8b", None, (4, 4096), (256, 8, 32, 64, 128, 1)),
)
"""What is measured first is what matters most where the seconds are few."""
SMALL_TABLE = (
    Rows("random:tiny-llama", (2, 32), (2, 64), (1, 8)),
    Rows("random:tiny-llama", (2, 32), layers=1),
)


WHOLE = 4096
"""Tokens of a prompt that are one chunk at most, unless ``--chunk`` says otherwise."""


def config_of(
    rows: int, length: int, invariant: bool, device: str, chunk: int = WHOLE
) -> EngineConfig:
    """What engines are made with; ``chunk`` tokens of a prompt are prefilled at once."""
    chunk = min(length, chunk)
    return EngineConfig(
        device=device,
        depth=1,
        batch_invariant=invariant,
        max_requests=rows,
        max_tokens=max(8192, rows + chunk),
        prefill_chunk_tokens=chunk,
        max_sequence_length=length,
        block_size_tokens=BLOCK,
        block_count=rows * (2 + length // BLOCK),
        num_cuda_graphs=1,
        capture_mixed_steps=False,
        enable_prefix_caching=False,
    )


def params_of(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=length, termination_id=-1)


def prompts_of(rows: int, length: int) -> list[Any]:
    return [[(17 * row + place) % 200 + 3 for place in range(length)] for row in range(rows)]


def begin_decoding(engine: DynamicInferenceEngine, rows: int, prompt: int, steps: int) -> None:
    """Have all rows decode, for ``steps`` steps and some more."""
    for number, tokens in enumerate(prompts_of(rows, prompt)):
        engine.add_request(number, tokens, params_of(steps + WARMUP + 20))
    counters = engine.counters
    while engine.scheduler.waiting_count or counters.tokens_committed < rows:
        engine.step_modern()
    begun = counters.steps_committed
    while counters.steps_committed < begun + WARMUP:
        engine.step_modern()


def step_ms(engine: DynamicInferenceEngine, rows: int, prompt: int, steps: int) -> float:
    """ms of a decode step of all rows."""
    begin_decoding(engine, rows, prompt, steps)
    counters = engine.counters
    before, started = counters.steps_committed, time.perf_counter()
    while counters.steps_committed < before + steps:
        engine.step_modern()
    seconds = time.perf_counter() - started
    assert engine.scheduler.unfinished_count == rows, "a row has ended"
    taken = counters.steps_committed - before
    engine.reset()
    return seconds / taken * 1e3


def print_kernels(engine: DynamicInferenceEngine, rows: int, prompt: int, what: str) -> None:
    """The kernels of decode steps of all rows."""
    steps = 5
    begin_decoding(engine, rows, prompt, steps + 5)
    before = engine.counters.steps_committed

    def some_steps() -> int:
        while engine.counters.steps_committed < before + steps:
            engine.step_modern()
        return engine.counters.steps_committed - before

    profile_invariance.print_kernels(what, some_steps)
    engine.reset()


def prefill_ms(engine: DynamicInferenceEngine, rows: int, prompt: int) -> float:
    """ms until all rows have a token."""
    started = time.perf_counter()
    engine.generate(prompts_of(rows, prompt), params_of(1))
    return (time.perf_counter() - started) * 1e3


def train_ms(model: Any, rows: int, length: int, device: torch.device) -> float:
    """ms of forward and backward of a loss over all tokens."""
    tokens = torch.tensor(prompts_of(rows, length), device=device)
    positions = torch.arange(length, device=device).expand(rows, -1)
    for parameter in model.parameters():
        parameter.grad = None
    synchronize(device)
    started = time.perf_counter()
    model(tokens, positions, None, labels=tokens).mean().backward()
    synchronize(device)
    return (time.perf_counter() - started) * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(rounds: int, ways: dict[bool, Callable[[], float]]) -> dict[bool, float]:
    """Medians of each way behind a first round, which compiles kernels."""
    found: dict[bool, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, measured in ways.items():
            figure = measured()
            if number:
                found[way].append(figure)
    return {way: statistics.median(each) for way, each in found.items()}


@contextlib.contextmanager
def both_engines(
    first: DynamicInferenceEngine, rows: int, length: int, device: str, chunk: int = WHOLE
) -> Iterator[dict[bool, DynamicInferenceEngine]]:
    """Engines of both ways over one model."""
    with contextlib.ExitStack() as stack:
        yield {
            way: stack.enter_context(first.with_config(config_of(rows, length, way, device, chunk)))
            for way in WAYS
        }


class Bench:
    """Prints lines, of which none begins when the seconds are over.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._begun = time.perf_counter()

    def table(self, table: tuple[Rows, ...]) -> None:
        """All lines of ``table``."""
        print("| | plain ms | invariant ms | |\n|---|---|---|---|", flush=True)
        for rows in table:
            if rows.layers is not None:
                assert rows.train is not None
                what = f"{rows.model}, {rows.layers} layers, "
                cut = functools.partial(self._cut, rows)
                self._line(f"{what}{self._train_name(rows.train)}", cut)
                continue
            if self._is_over():
                self._left_out(f"{rows.model}")
                continue
            config = config_of(1, 128, False, self._args.device)
            with DynamicInferenceEngine.from_pretrained(rows.model, config) as first:
                self._of_engine(rows, first, f"{rows.model}, " if len(table) > 1 else "")

    def _of_engine(self, rows: Rows, first: DynamicInferenceEngine, what: str) -> None:
        if rows.train is not None:
            train = functools.partial(self._train, first.model.network.model, rows.train)
            self._line(f"{what}{self._train_name(rows.train)}", train)
        if rows.prefill is not None:
            count, length = rows.prefill
            prefill = functools.partial(self._prefill, first, rows.prefill)
            chunks = f" in chunks of {self._args.chunk}" if self._args.chunk < length else ""
            self._line(f"{what}prefill, {count} x {length}{chunks}", prefill)
        for count in rows.decode:
            decode = functools.partial(self._decode, first, count)
            self._line(f"{what}decode, {count} rows", decode)

    def _train_name(self, size: Size) -> str:
        return f"trainer's step, {size[0]} x {size[1]}"

    def _line(self, what: str, measured: Callable[[], dict[bool, float]]) -> None:
        if self._is_over():
            self._left_out(what)
            return
        try:
            found = measured()
        except torch.OutOfMemoryError as error:
            print(f"| {what} | no memory: {str(error).splitlines()[0]} | | |", flush=True)
            torch.cuda.empty_cache()
            return
        plain, exact = found[False], found[True]
        print(f"| {what} | {plain:.3f} | {exact:.3f} | {exact / plain - 1:+.1%} |", flush=True)
        print(f"# {time.perf_counter() - self._begun:.0f} s", file=sys.stderr, flush=True)

    def _is_over(self) -> bool:
        return time.perf_counter() - self._begun > self._args.seconds

    def _left_out(self, what: str) -> None:
        print(f"# left out, the seconds are over: {what}", file=sys.stderr, flush=True)

    def _decode(self, first: DynamicInferenceEngine, rows: int) -> dict[bool, float]:
        args = self._args
        length = args.prompt + args.steps + WARMUP + 40

        def of(engine: DynamicInferenceEngine) -> Callable[[], float]:
            return lambda: step_ms(engine, rows, args.prompt, args.steps)

        with both_engines(first, rows, length, args.device) as engines:
            return in_turns(args.rounds, {way: of(engine) for way, engine in engines.items()})

    def _prefill(self, first: DynamicInferenceEngine, size: Size) -> dict[bool, float]:
        rows, length = size

        def of(engine: DynamicInferenceEngine) -> Callable[[], float]:
            return lambda: prefill_ms(engine, rows, length)

        chunk, device = self._args.chunk, self._args.device
        with both_engines(first, rows, length + 8, device, chunk) as engines:
            return in_turns(self._args.rounds, {way: of(each) for way, each in engines.items()})

    def _cut(self, rows: Rows) -> dict[bool, float]:
        """A trainer's step of the first layers of a shape."""
        assert rows.train is not None and rows.layers is not None
        config = dataclasses.replace(
            SHAPES[rows.model.removeprefix("random:")], num_layers=rows.layers
        )
        device = torch.device(self._args.device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return self._train(build_random_model(config, device=device, dtype=dtype), rows.train)

    def _train(self, model: Any, size: Size) -> dict[bool, float]:
        """A trainer's step; then the model serves again."""
        rows, length = size
        device = next(model.parameters()).device
        model.train().requires_grad_(True)

        def exact() -> float:
            with exact_numerics(model):
                return train_ms(model, rows, length, device)

        try:
            return in_turns(
                self._args.rounds,
                {False: lambda: train_ms(model, rows, length, device), True: exact},
            )
        finally:
            model.eval().requires_grad_(False)
            for parameter in model.parameters():
                parameter.grad = None


def sizes(text: str) -> Size:
    rows, length = text.split("x")
    return int(rows), int(length)


def profile(args: argparse.Namespace) -> None:
    """What ``--profile`` prints; with ``--prefill`` the kernels of that, too."""
    with DynamicInferenceEngine.from_pretrained(
        args.model, config_of(1, 128, False, args.device)
    ) as first:
        for rows in [int(each) for each in args.batch_sizes.split(",") if each]:
            with both_engines(first, rows, args.prompt + WARMUP + 50, args.device) as engines:
                for way, engine in engines.items():
                    what = f"{'invariant' if way else 'plain'}, {rows} rows"
                    print_kernels(engine, rows, args.prompt, what)
        if args.prefill is not None:
            rows, length = args.prefill
            with both_engines(first, rows, length + 8, args.device, args.chunk) as engines:
                for way, engine in engines.items():
                    what = f"{'invariant' if way else 'plain'}, prefill of {rows} x {length}"
                    prefill_ms(engine, rows, length)
                    profile_invariance.print_kernels(
                        what, lambda engine=engine: bool(prefill_ms(engine, rows, length))
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="tiny", help="a name, a directory or random:SHAPE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-sizes", default="1,32", help="decode rows; nothing: none")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a decode row's")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="kernels of steps on a GPU")
    parser.add_argument("--products", action="store_true", help="products by tile on a GPU")
    parser.add_argument("--table", action="store_true", help="all lines, whatever else is given")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no line begins after them"
    )
    parser.add_argument("--prefill", type=sizes, help="PROMPTSxTOKENS")
    parser.add_argument("--chunk", type=int, default=WHOLE, help="tokens of a prefill's chunk")
    parser.add_argument("--train", type=sizes, help="SEQUENCESxTOKENS")
    args = parser.parse_args()
    if args.products:
        profile_invariance.print_products(torch.device(args.device))
        return
    if args.profile:
        profile(args)
        return
    table: tuple[Rows, ...] = TABLE if args.device.startswith("cuda") else SMALL_TABLE
    if not args.table:
        decode = tuple(int(each) for each in args.batch_sizes.split(",") if each)
        table = (Rows(args.model, args.train, args.prefill, decode),)
    Bench(args).table(table)


if __name__ == "__main__":
    main()
