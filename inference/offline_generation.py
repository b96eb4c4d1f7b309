"""Texts for a list of prompts, and nothing else.

python inference/offline_generation.py --model tiny --prompts "def add(" "class Stack:"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    # This file lies in a checkout, whose package need not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a model directory, or tiny")
    parser.add_argument("--prompts", nargs="+", default=["def fibonacci(n):", "import os"])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(argv)

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=args.max_new_tokens)
    config = EngineConfig(inference_async_scheduling=True)
    with DynamicInferenceEngine.from_pretrained(args.model, config) as engine:
        for request in engine.generate(args.prompts, params):
            print(f"{request.prompt}{request.generated_text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
