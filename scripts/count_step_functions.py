"""How many of our functions and files a steady decode step crosses on the host's thread, and the
life of a request.

    python scripts/count_step_functions.py [--requests N] [--depth N] [--life] [--list]

The embedded model on a CPU; the largest numbers of several steps are printed. A function counts
once, however often it is called, under its file; a lambda and a generator are functions too, a
comprehension is part of its function. What the device's thread calls does not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import megatron_async
from megatron_async import EngineConfig, SamplingParams
from megatron_async.engine.engine import DynamicInferenceEngine

PACKAGE = Path(megatron_async.__file__).parent
WARM_UP_STEPS = 10

Functions = set[tuple[str, str]]
"""Each with its file."""


@contextmanager
def functions_called() -> Iterator[Functions]:
    """See what of ours is called on this thread until this is left."""
    seen: Functions = set()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(PACKAGE) and not name.endswith("comp>"):
            seen.add((str(path.relative_to(PACKAGE)), name))

    sys.setprofile(on_call)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def files_of(functions: Functions) -> set[str]:
    """The files that functions are in."""
    return {file for file, _ in functions}


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
        found = []
        for _ in range(steps):
            with functions_called() as functions:
                engine.step_modern()
            found.append(functions)
        return found


def life_of_a_request(depth: int = 1) -> tuple[Functions, Functions]:
    """Return the functions of ``add_request``, and of all from there to the finished future, of one
    greedy request of token ids for eight tokens in an engine that has served another one."""
    chain: dict[str, Any] = {"inference_async_scheduling": depth > 0, "depth": depth or None}
    config = EngineConfig(**chain, device="cpu", block_size_tokens=256)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        before = engine.add_request(0, [10, 20, 30], params)
        while not before.done():
            engine.step_modern()
        with functions_called() as added:
            future = engine.add_request(1, [10, 20, 30, 40], params)
        with functions_called() as decoded:
            while not future.done():
                engine.step_modern()
        assert len(future.result().generated_tokens) == 8
    return added, added | decoded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--life", action="store_true", help="of a request, not of a step")
    args = parser.parse_args()
    if args.life:
        added, most = life_of_a_request(args.depth)
        print(f"add_request: {len(files_of(added))} files, {len(added)} functions")
    else:
        most = max(steady_steps(args.requests, args.depth), key=len)
    print(f"{len(files_of(most))} files, {len(most)} functions")
    if args.list:
        print(*(f"{file} {function}" for file, function in sorted(most)), sep="\n")
