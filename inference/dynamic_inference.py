"""Requests that arrive while others decode, with megatron-core's names.

    python inference/dynamic_inference.py --load tiny --prompts "def add(" "class Stack:" \
        --num-tokens-to-generate 16 --inference-async-scheduling

A prompt arrives every ``--arrival-steps`` steps. Each is printed with its text when it is finished.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # This file lies in a checkout, whose package need not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_async import EngineConfig
from megatron_async.megatron_api import DynamicInferenceEngine, SamplingParams


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Megatron's names of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", default="tiny", help="a model directory, or tiny")
    parser.add_argument("--prompts", nargs="+", default=["def fibonacci(n):", "import os"])
    parser.add_argument("--num-tokens-to-generate", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=1)
    parser.add_argument("--inference-dynamic-batching-max-requests", type=int, default=8)
    parser.add_argument("--inference-async-scheduling", action="store_true")
    parser.add_argument("--arrival-steps", type=int, default=4, help="between two prompts")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    args = parse_args(argv)
    config = EngineConfig(
        inference_async_scheduling=args.inference_async_scheduling,
        max_requests=args.inference_dynamic_batching_max_requests,
    )
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        num_tokens_to_generate=args.num_tokens_to_generate,
    )
    with DynamicInferenceEngine.from_pretrained(args.load, config) as engine:
        arriving = list(enumerate(args.prompts))
        started, steps, tokens = time.perf_counter(), 0, 0
        while arriving or engine.has_unfinished_requests():
            if arriving and steps % args.arrival_steps == 0:
                engine.add_request(*arriving.pop(0), params)
            result = engine.step_modern()
            steps += 1
            for record in result["finished_request_records"]:
                request = record.merge()
                tokens += len(request.generated_tokens)
                print(f"{request.request_id}: {request.prompt!r} -> {request.generated_text!r}")
        seconds = time.perf_counter() - started
    print(f"{tokens} tokens in {steps} steps, {tokens / seconds:.0f} tokens/s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
