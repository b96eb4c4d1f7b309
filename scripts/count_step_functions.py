"""How many of our functions and files a steady decode step crosses on the host's thread.

    python scripts/count_step_functions.py [--requests N] [--depth N] [--list]

The embedded model on a CPU; the largest numbers of several steps are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import megatron_async
from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams

PACKAGE = Path(megatron_async.__file__).parent
WARM_UP_STEPS = 10


class StepCount(NamedTuple):
    """Our files and functions that one step crosses."""

    files: frozenset[str]
    functions: frozenset[tuple[str, str]]


def count_step(engine: DynamicInferenceEngine) -> StepCount:
    """Run one step of ``engine`` and count on this thread."""
    seen: set[tuple[str, str]] = set()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.add((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    sys.setprofile(on_call)
    try:
        engine.step_modern()
    finally:
        sys.setprofile(None)
    return StepCount(frozenset(file for file, _ in seen), frozenset(seen))


def count_steady_steps(requests: int = 1, depth: int = 1, steps: int = 5) -> list[StepCount]:
    """Counts of ``steps`` steps that decode one token for each of ``requests`` requests."""
    config = EngineConfig(
        inference_async_scheduling=depth > 0,
        depth=depth or None,
        device="cpu",
        block_size_tokens=256,
    )
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=64, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        for number in range(requests):
            engine.add_request(number, f"def f{number}(x):", params)
        for _ in range(WARM_UP_STEPS):
            engine.step_modern()
        return [count_step(engine) for _ in range(steps)]


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="name the functions")
    args = parser.parse_args()
    counts = count_steady_steps(args.requests, args.depth)
    most = max(counts, key=lambda count: len(count.functions))
    print(f"{len(most.files)} files, {len(most.functions)} functions")
    if args.list:
        print(*(f"{file} {function}" for file, function in sorted(most.functions)), sep="\n")


if __name__ == "__main__":
    main()
