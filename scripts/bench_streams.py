"""How long asyncio streams keep an event loop waiting, and how fast they are.

    python scripts/bench_streams.py [--streams N] [--tokens N] [--depth N] [--model tiny|PATH]

A coroutine that sleeps a millisecond at a time measures by how much it wakes too late.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams

NAP_SECONDS = 1e-3


async def measure(engine: DynamicInferenceEngine, streams: int, tokens: int) -> dict[str, float]:
    """Lags of the event loop in milliseconds, and tokens a second of all streams together."""
    lags: list[float] = []
    params = SamplingParams(
        temperature=0.8, seed=1, num_tokens_to_generate=tokens, termination_id=-1
    )

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(NAP_SECONDS)
            lags.append(1e3 * (time.perf_counter() - before - NAP_SECONDS))

    async def consume(number: int) -> int:
        return len([out async for out in engine.stream(f"def f{number}(x):", params)])

    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    counts = await asyncio.gather(*map(consume, range(streams)))
    seconds = time.perf_counter() - started
    watcher.cancel()
    return {
        "lag_ms_p50": statistics.median(lags),
        "lag_ms_max": max(lags),
        "tokens_per_second": sum(counts) / seconds,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    for name, default in (("streams", 32), ("tokens", 100), ("depth", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = EngineConfig(depth=args.depth)
    with DynamicInferenceEngine.from_pretrained(args.model, config) as engine:
        for name, value in asyncio.run(measure(engine, args.streams, args.tokens)).items():
            print(f"{name} {value:.3g}")


if __name__ == "__main__":
    main()
