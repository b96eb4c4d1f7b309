"""Measure what the host does in a step of guided rows, with the model's work left out.

    python -m scripts.measure_guided_steps [--rows 1,8,20,32] [--ways none,grammar,ngram] [--profile]

The embedded model on a CPU whose work is done inside of the host's waits, so that nothing else runs
while the host works; waits are taken out. Rows have ten function schemas in turn, in arrays that
never end. Figures are us of a step in the least of several rounds: all that the host does, the part
of it between the arrival of tokens and the launch that they are waited for by, and that a token.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
import torch

import megatron_async
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.network import Network
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.sampling_params import SamplingParams
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.guided_tokens import SCHEMAS

WARMUP, STEPS, ROUNDS, MANY, BLOCK = 20, 60, 5, 500, 64


class LittleModel(Network):
    """Logits of a hash of token and position; no attention."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.max_sequence_length = vocab_size, length
        self.logits_dtype = torch.float32
        self.kv_cache_spec = KVCacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32
        )
        self._ids = torch.arange(vocab_size)

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardBatch
    ) -> torch.Tensor:
        state = 48271 * token_ids + 7919 * position_ids
        if context.last_token_index is not None:
            state = state[context.last_token_index]
        mixed = (state[:, None] * (2 * self._ids + 1) + 7919 * self._ids) % 65521 % 512
        return mixed.to(torch.float32) / 64.0


class Clock:
    """What the host does outside of waits.

    Attributes:
        waited, launching: ns in waits, and from the last tokens to the end of each launch, waits
            left out.
    """

    def __init__(self) -> None:
        self.waited = self.launching = 0
        self._queued: deque[tuple[Callable[[], None], str, int, int]] = deque()
        self._arrived = self._waited_then = 0

    def enqueue(self, device: CpuDevice, work: Callable[[], None], name: str) -> None:
        device.raise_failure()
        self._queued.append((work, name, -1, -1))

    def wait_until(self, device: CpuDevice, ready: Callable[[], bool]) -> None:
        started = time.thread_time_ns()
        with torch.inference_mode():
            while not ready():
                device.raise_failure()
                device.run(*self._queued.popleft())
        self.waited += time.thread_time_ns() - started

    def synchronize(self, device: CpuDevice) -> None:
        self.wait_until(device, lambda: not self._queued)
        device.raise_failure()

    def taken(self) -> None:
        self._arrived, self._waited_then = time.thread_time_ns(), self.waited

    def launched(self) -> None:
        self.launching += time.thread_time_ns() - self._arrived
        self.launching -= self.waited - self._waited_then


def clocked(clock: Clock) -> Any:
    """Have ``clock`` do the work of CPU devices."""
    take, launch = ModelRunner.take, ModelRunner.launch

    def takes(self: ModelRunner, ticket: Any) -> Any:
        waited = clock.waited
        started = time.thread_time_ns()
        result = take(self, ticket)
        clock.taken()
        # What it takes to read them counts.
        clock._arrived -= time.thread_time_ns() - started - (clock.waited - waited)
        return result

    def launches(self: ModelRunner, plan: Any) -> Any:
        ticket = launch(self, plan)
        clock.launched()
        return ticket

    stack = [
        patch.object(CpuDevice, "enqueue", lambda d, w, n: clock.enqueue(d, w, n)),
        patch.object(CpuDevice, "wait_until", lambda d, r: clock.wait_until(d, r)),
        patch.object(CpuDevice, "synchronize", lambda d: clock.synchronize(d)),
        patch.object(ModelRunner, "take", takes),
        patch.object(ModelRunner, "launch", launches),
    ]
    return stack


def config_of(way: str, rows: int, drafts: int, depth: int) -> EngineConfig:
    has: dict[str, Any] = {} if way == "none" else {"speculative_method": way}
    length = 16 + (STEPS * ROUNDS + WARMUP) * (1 + drafts) + 80
    return EngineConfig(
        depth=depth, num_speculative_tokens=drafts if has else 0, max_requests=rows,
        max_sequence_length=length, block_size_tokens=BLOCK, batch_invariant=True,
        block_count=rows * (2 + length // BLOCK), enable_prefix_caching=False, device="cpu", **has,
    )  # fmt: skip


def measured(engine: DynamicInferenceEngine, rows: int, clock: Clock, profile: Any) -> list[float]:
    for number in range(rows):
        items = list(SCHEMAS.values())[number % len(SCHEMAS)]
        endless = {"type": "array", "items": items, "minItems": MANY}
        params = SamplingParams(
            temperature=number % 2,
            seed=number,
            num_tokens_to_generate=engine.config.max_sequence_length - 80,
            termination_id=-1,
            structured_outputs={"json": endless, "disable_any_whitespace": True},
        )
        engine.add_request(number, [(17 * number + place) % 200 + 3 for place in range(16)], params)
    for _ in range(WARMUP):
        engine.step_modern()
    found = []
    if profile is not None:
        profile.enable()
    for _ in range(ROUNDS):
        tokens = engine.counters.tokens_committed
        waited, launching, started = clock.waited, clock.launching, time.thread_time_ns()
        for _ in range(STEPS):
            engine.step_modern()
        took = time.thread_time_ns() - started - (clock.waited - waited)
        tokens = (engine.counters.tokens_committed - tokens) / STEPS
        found.append(
            (took / STEPS / 1e3, (clock.launching - launching) / STEPS / 1e3, tokens / rows)
        )
    if profile is not None:
        profile.disable()
    assert engine.scheduler.unfinished_count == rows, "a row has ended"
    return [
        min(each[0] for each in found),
        min(each[1] for each in found),
        sum(e[2] for e in found) / ROUNDS,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rows", default="1,8,20,32")
    parser.add_argument("--ways", default="none,grammar,ngram")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    clock = Clock()
    if args.tokenizer is None:
        tokenizer = Tokenizer.from_directory(
            Path(megatron_async.__file__).parent / "assets" / "tiny"
        )
    else:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(args.tokenizer)))
    for each in clocked(clock):
        each.start()
    torch.set_num_threads(1)
    for rows in map(int, args.rows.split(",")):
        for way in args.ways.split(","):
            profile = cProfile.Profile() if args.profile else None
            clock._queued.clear()
            config = config_of(way, rows, args.drafts, args.depth)
            network = LittleModel(tokenizer.vocab_size, config.max_sequence_length)
            with DynamicInferenceEngine(
                ServedModel(network=network, tokenizer=tokenizer), config
            ) as engine:
                host, launch, tokens = measured(engine, rows, clock, profile)
            print(
                f"| {rows} | {way} | {host:.0f} | {launch:.0f} | {tokens:.2f} | {host / tokens / rows:.0f} | {launch / tokens / rows:.0f} |",
                flush=True,
            )
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(
                    "engine.|grammar.|scheduler.|guided_drafts|model_runner|packet|cuda_graphs|step.plan|LLM|LLE|device.cpu|NamedTuple|numpy",
                    48,
                )


if __name__ == "__main__":
    main()
