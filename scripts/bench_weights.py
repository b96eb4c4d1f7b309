"""What new weights, sleep and waking up cost, beside a plain copy of the same bytes.

PYTHONPATH=. python scripts/bench_weights.py --model random:llama8b
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.weights.shared_memory import SharedWeights, open_weights

MIB = 1 << 20
STEPS = 16
"""Decode steps of a measurement under load, with an update in front of them and without: the update
costs the difference."""


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of ``repeats``, after one that does not count."""
    times = []
    for _ in range(1 + repeats):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, times in milliseconds."""
    config = EngineConfig(
        device=args.device, inference_async_scheduling=True, max_requests=args.requests,
        max_sequence_length=1024, enable_sleep_mode=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=512, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained(args.model, config) as engine:
        device = engine.cache.device
        parameters = dict(engine.model.network.model.named_parameters())
        targets = [parameter.detach() for parameter in parameters.values()]
        new = {name: parameter.detach().clone() for name, parameter in parameters.items()}

        def copy() -> None:
            with torch.inference_mode():
                torch._foreach_copy_(targets, list(new.values()))

        def update(*, unchecked: bool, recompute: bool = False) -> None:
            engine.update_weights(
                new, allow_non_finite_weights=unchecked, recompute_kv_cache=recompute
            )

        times = {
            "plain copy": seconds_of(copy, device, args.repeats),
            "update": seconds_of(lambda: update(unchecked=False), device, args.repeats),
            "update, unchecked": seconds_of(lambda: update(unchecked=True), device, args.repeats),
        }
        for number in range(args.requests):
            engine.add_request(number, [number + 1] * 64, params)
        for _ in range(16):
            engine.step_modern()

        def some_steps() -> None:
            for _ in range(STEPS):
                engine.step_modern()

        plain = seconds_of(some_steps, device, args.repeats)
        for recompute in (False, True):

            def updated_steps(recompute: bool = recompute) -> None:
                update(unchecked=False, recompute=recompute)
                some_steps()

            name = "update under load" + ", KV cache computed again" * recompute
            times[name] = seconds_of(updated_steps, device, args.repeats) - plain
        if device.type == "cpu":  # a GPU's own process cannot open its handles
            with SharedWeights(new) as shared:
                times["by shared memory, unchecked"] = seconds_of(
                    lambda: engine.update_weights(
                        open_weights(shared.export()), allow_non_finite_weights=True
                    ),
                    device,
                    args.repeats,
                )
        for level in (1, 2):
            start = time.perf_counter()
            engine.sleep(level)
            slept = time.perf_counter()
            engine.wake_up()
            if level == 2:
                update(unchecked=True)
            times[f"sleep {level}"] = slept - start
            times[f"wake up {level}" + (", update" if level == 2 else "")] = (
                time.perf_counter() - slept
            )
        weights = sum(target.nbytes for target in targets)
        return {
            "model": args.model,
            "device": str(device),
            "weights_mib": round(weights / MIB, 1),
            "kv_cache_mib": round(engine.cache.kv.nbytes / MIB, 1),
            "ms": {name: round(1e3 * value, 3) for name, value in times.items()},
            "of_plain_copy": {
                name: round(value / times["plain copy"], 2)
                for name, value in times.items()
                if name.startswith("update")
            },
        }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
