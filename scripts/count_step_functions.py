"""How many of our functions and files a steady decode step crosses on the host's thread.

    python scripts/count_step_functions.py [--requests N] [--depth N] [--list]

The embedded model on a CPU; the largest numbers of several steps are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import megatron_async
from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams

PACKAGE = Path(megatron_async.__file__).parent
WARM_UP_STEPS = 10

Functions = set[tuple[str, str]]
"""Each with its file."""


def functions_of_step(engine: DynamicInferenceEngine) -> Functions:
    """Run one step of ``engine`` and see what of ours is called on this thread."""
    seen: Functions = set()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.add((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    sys.setprofile(on_call)
    try:
        engine.step_modern()
    finally:
        sys.setprofile(None)
    return seen


def steady_steps(requests: int = 1, depth: int = 1, steps: int = 5) -> list[Functions]:
    """Return the functions of ``steps`` steps that decode one token for each of ``requests``
    requests."""
    chain: dict[str, Any] = {"depth": depth}
    config = EngineConfig(**chain, device="cpu", block_size_tokens=256)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=64, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        for number in range(requests):
            engine.add_request(number, f"def f{number}(x):", params)
        for _ in range(WARM_UP_STEPS):
            engine.step_modern()
        return [functions_of_step(engine) for _ in range(steps)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="name the functions")
    args = parser.parse_args()
    most = max(steady_steps(args.requests, args.depth), key=len)
    print(f"{len({file for file, _ in most})} files, {len(most)} functions")
    if args.list:
        print(*(f"{file} {function}" for file, function in sorted(most)), sep="\n")
