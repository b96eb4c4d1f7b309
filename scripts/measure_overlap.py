"""Measure what overlap saves: steps a second and hidden host time, serial against depth 1 and more.

    python scripts/measure_overlap.py --batch-size 8 --new-tokens 256

Host time of a step is the time the host is not blocked on the device. The hidden share is, on a
GPU, the part of the serial host time by which a step became shorter. On a CPU host and device share
the cores and differences of whole steps drown in noise: there it is the part of the host time
during which the device's recorded timeline shows it at work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from tqdm import tqdm

from megatron_async.config import EngineConfig
from megatron_async.device.cpu import CpuDevice, Span
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import StepResult, Ticket


class HostClock:
    """Times at which the host was at work, [start, end) in nanoseconds."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.intervals: list[tuple[int, int]] = []
        self._since = 0
        take = engine.controller.take

        def timed_take(ticket: Ticket) -> StepResult:
            self.intervals.append((self._since, time.perf_counter_ns()))
            result = take(ticket)
            self._since = time.perf_counter_ns()
            return result

        engine.controller.take = timed_take  # type: ignore[method-assign]

    def start(self) -> None:
        self._since = time.perf_counter_ns()

    def stop(self) -> None:
        self.intervals.append((self._since, time.perf_counter_ns()))

    def share_beside(self, spans: list[Span]) -> float:
        """Part of the host time that lies inside the device's spans."""
        hidden = 0
        position = 0
        for start, end in self.intervals:
            while position < len(spans) and spans[position].end_ns <= start:
                position += 1
            for span in spans[position:]:
                if span.start_ns >= end:
                    break
                hidden += min(end, span.end_ns) - max(start, span.start_ns)
        return hidden / sum(end - start for start, end in self.intervals)


def measure(engine: DynamicInferenceEngine, batch_size: int, new_tokens: int) -> dict[str, float]:
    """Milliseconds of a decode step: whole, host and waiting (medians), and tokens a second."""
    params = SamplingParams(temperature=0, num_tokens_to_generate=new_tokens, termination_id=-1)
    for i in range(batch_size):
        engine.add_request(i, f"def function_{i}(argument):\n", params)
    steps, hosts = [], []
    waited = engine.controller.wait_ns
    device = engine.device
    timeline = device.timeline if isinstance(device, CpuDevice) else None
    clock = HostClock(engine) if timeline is not None else None
    while engine.has_unfinished_requests():
        if clock is not None:
            clock.start()
        seconds = engine.step_modern()["step_time"]
        if clock is not None:
            clock.stop()
        wait = (engine.controller.wait_ns - waited) * 1e-9
        waited = engine.controller.wait_ns
        steps.append(seconds)
        hosts.append(seconds - wait)
    # The first steps prefill, the last ones drain.
    steps, hosts = steps[10:-10], hosts[10:-10]
    figures = {
        "step_ms": statistics.median(steps) * 1e3,
        "host_ms": statistics.median(hosts) * 1e3,
        "tokens_per_second": batch_size * len(steps) / sum(steps),
    }
    if clock is not None and timeline is not None:
        figures["hidden_share"] = clock.share_beside(timeline)
        timeline.clear()
        del engine.controller.take
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--depths", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    if depths[0] != 0:
        raise SystemExit("--depths must begin with 0, the baseline")

    configs = {
        depth: EngineConfig(
            inference_async_scheduling=depth > 0,
            depth=depth or None,
            max_requests=args.batch_size,
            device=args.device,
        )
        for depth in depths
    }
    first = DynamicInferenceEngine.from_pretrained(args.model, configs[0])
    engines = {0: first} | {d: first.with_config(configs[d]) for d in depths[1:]}
    for engine in engines.values():
        if isinstance(engine.device, CpuDevice):
            engine.device.timeline = []
    results: dict[int, list[dict[str, float]]] = {depth: [] for depth in depths}
    # Rounds alternate between depths, so that a noisy machine disturbs all of them alike.
    for _ in tqdm(range(args.rounds), file=sys.stderr):
        for depth, engine in engines.items():
            results[depth].append(measure(engine, args.batch_size, args.new_tokens))
    table = {
        depth: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
        for depth, rows in results.items()
    }
    serial = table[0]
    for row in table.values():
        if "hidden_share" in row:
            continue
        row["hidden_share"] = (serial["step_ms"] - row["step_ms"]) / serial["host_ms"]
    if args.json:
        print(json.dumps(table))
        return
    print(f"{args.model}, batch {args.batch_size}, {first.context.device}, ms a step (median)")
    print(f"{'depth':>5} {'step':>8} {'host':>8} {'hidden':>8} {'tokens/s':>10}")
    for depth, row in table.items():
        print(
            f"{depth:>5} {row['step_ms']:>8.3f} {row['host_ms']:>8.3f} "
            f"{row['hidden_share']:>8.0%} {row['tokens_per_second']:>10.0f}"
        )


if __name__ == "__main__":
    main()
