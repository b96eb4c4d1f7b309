"""What batch-invariant kernels and exact numerics cost: the table of ``docs/rl.md``.

    python -m scripts.bench_invariance --model random:llama8b --batch-sizes 1,32,64,128,256
    python -m scripts.bench_invariance --model tiny --batch-sizes 1,8 --prefill 2x64 --train 2x64
    python -m scripts.bench_invariance --model random:llama8b --batch-sizes 32 --profile

Decode steps are greedy, at depth 1. Prefill is the time until all prompts have their first token.
A trainer's step is forward and backward of all tokens, without an optimizer. Rounds alternate
between the two ways; figures are medians. ``--profile`` says which kernels a decode step has, and
what products of Llama-8B take with each tile (``scripts/profile_invariance.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.training import exact_numerics
from scripts import profile_invariance

WARMUP, BLOCK = 20, 64
WAYS = (False, True)
"""Whether kernels are batch-invariant."""


def config_of(rows: int, length: int, invariant: bool, device: str) -> EngineConfig:
    return EngineConfig(
        device=device,
        depth=1,
        batch_invariant=invariant,
        max_requests=rows,
        max_tokens=max(8192, rows),
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
    first: DynamicInferenceEngine, rows: int, length: int, device: str
) -> Iterator[dict[bool, DynamicInferenceEngine]]:
    """Engines of both ways over one model."""
    with contextlib.ExitStack() as stack:
        yield {
            way: stack.enter_context(first.with_config(config_of(rows, length, way, device)))
            for way in WAYS
        }


def print_line(what: str, plain: float, exact: float) -> None:
    print(f"| {what} | {plain:.3f} | {exact:.3f} | {exact / plain - 1:+.1%} |", flush=True)


def sizes(text: str) -> tuple[int, int]:
    rows, length = text.split("x")
    return int(rows), int(length)


def profile(args: argparse.Namespace) -> None:
    """What ``--profile`` prints; with ``--prefill`` the kernels of that, too."""
    profile_invariance.print_products(torch.device(args.device))
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
            with both_engines(first, rows, length + 8, args.device) as engines:
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
    parser.add_argument(
        "--profile", action="store_true", help="kernels of decode steps, and products, on a GPU"
    )
    parser.add_argument("--prefill", type=sizes, help="PROMPTSxTOKENS")
    parser.add_argument("--train", type=sizes, help="SEQUENCESxTOKENS")
    args = parser.parse_args()
    if args.profile:
        profile(args)
        return
    print("| | plain ms | invariant ms | |\n|---|---|---|---|")
    with DynamicInferenceEngine.from_pretrained(
        args.model, config_of(1, 128, False, args.device)
    ) as first:
        for rows in [int(each) for each in args.batch_sizes.split(",") if each]:
            length = args.prompt + args.steps + WARMUP + 40
            with both_engines(first, rows, length, args.device) as engines:
                found = in_turns(
                    args.rounds,
                    {
                        way: lambda engine=engine, rows=rows: step_ms(
                            engine, rows, args.prompt, args.steps
                        )
                        for way, engine in engines.items()
                    },
                )
            print_line(f"decode, {rows} rows", found[False], found[True])
        if args.prefill is not None:
            rows, length = args.prefill
            with both_engines(first, rows, length + 8, args.device) as engines:
                found = in_turns(
                    args.rounds,
                    {
                        way: lambda engine=engine: prefill_ms(engine, rows, length)
                        for way, engine in engines.items()
                    },
                )
            print_line(f"prefill, {rows} x {length}", found[False], found[True])
        if args.train is not None:
            rows, length = args.train
            model = first.model.network.model.train()
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            device = next(model.parameters()).device

            def plain() -> float:
                return train_ms(model, rows, length, device)

            def exact() -> float:
                with exact_numerics(model):
                    return train_ms(model, rows, length, device)

            found = in_turns(args.rounds, {False: plain, True: exact})
            print_line(f"trainer's step, {rows} x {length}", found[False], found[True])


if __name__ == "__main__":
    main()
