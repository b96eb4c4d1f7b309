"""Measure what the host does in a step of guided rows, with the model's work left out.

    python -m scripts.measure_guided_steps [--rows 1,8,20,32] [--ways none,grammar,ngram]

A little model on a CPU whose work is done inside of the host's waits, so that nothing else runs
while the host works; waits are taken out. Rows have ten function schemas in turn, in arrays that
never end. A line has us of the process's CPU time in a step, each the least of five rounds: from
the arrival of tokens to the end of the launch that waits for them, which is what a GPU waits for,
and all; and tokens that a row brings.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from megatron_async.step.plan import Plan, Ticket
from megatron_async.step.records import StepResult
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
        started = time.process_time_ns()
        with torch.inference_mode():
            while not ready():
                device.raise_failure()
                device.run(*self._queued.popleft())
        self.waited += time.process_time_ns() - started

    def synchronize(self, device: CpuDevice) -> None:
        self.wait_until(device, lambda: not self._queued)
        device.raise_failure()

    def forget(self) -> None:
        """The device is gone."""
        self._queued.clear()

    def taken(self) -> None:
        self._arrived, self._waited_then = time.process_time_ns(), self.waited

    def launched(self) -> None:
        self.launching += time.process_time_ns() - self._arrived
        self.launching -= self.waited - self._waited_then


def replace_work(clock: Clock) -> None:
    """Have ``clock`` do the work of CPU devices from now on."""
    take, launch = ModelRunner.take, ModelRunner.launch

    def takes(self: ModelRunner, ticket: Ticket) -> StepResult:
        result = take(self, ticket)
        clock.taken()
        return result

    def launches(self: ModelRunner, plan: Plan) -> Ticket:
        ticket = launch(self, plan)
        clock.launched()
        return ticket

    for owner, name, value in (
        (CpuDevice, "enqueue", lambda *args: clock.enqueue(*args)),
        (CpuDevice, "wait_until", lambda *args: clock.wait_until(*args)),
        (CpuDevice, "synchronize", lambda *args: clock.synchronize(*args)),
        (ModelRunner, "take", takes),
        (ModelRunner, "launch", launches),
    ):
        setattr(owner, name, value)


def config_of(way: str, rows: int, drafts: int, depth: int) -> EngineConfig:
    has: dict[str, Any] = {} if way == "none" else {"speculative_method": way}
    length = 16 + (STEPS * ROUNDS + WARMUP) * (1 + drafts) + 80
    return EngineConfig(
        depth=depth, num_speculative_tokens=drafts if has else 0, max_requests=rows,
        max_sequence_length=length, block_size_tokens=BLOCK, batch_invariant=True,
        block_count=rows * (2 + length // BLOCK), enable_prefix_caching=False, device="cpu",
        guided_automata_bytes=0, **has,
    )  # fmt: skip


def measured(engine: DynamicInferenceEngine, rows: int, clock: Clock) -> tuple[float, float, float]:
    """Microseconds from arrival to launch and of all in a step, and tokens of a row."""
    for number in range(rows):
        items = list(SCHEMAS.values())[number % len(SCHEMAS)]
        endless = {"type": "array", "items": items, "minItems": MANY}
        params = SamplingParams(
            temperature=number % 2, seed=number, termination_id=-1,
            num_tokens_to_generate=engine.config.max_sequence_length - 80,
            structured_outputs={"json": endless, "disable_any_whitespace": True},
        )  # fmt: skip
        engine.add_request(number, [(17 * number + place) % 200 + 3 for place in range(16)], params)
    for _ in range(WARMUP):
        engine.step_modern()
    launching, whole, before = [], [], engine.counters.tokens_committed
    for _ in range(ROUNDS):
        waited, launched, started = clock.waited, clock.launching, time.process_time_ns()
        for _ in range(STEPS):
            engine.step_modern()
        whole.append(time.process_time_ns() - started - (clock.waited - waited))
        launching.append(clock.launching - launched)
    assert engine.scheduler.unfinished_count == rows, "a row has ended"
    tokens = (engine.counters.tokens_committed - before) / (ROUNDS * STEPS * rows)
    return min(launching) / STEPS / 1e3, min(whole) / STEPS / 1e3, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; that of `tiny` without")
    parser.add_argument("--rows", default="1,8,20,32")
    parser.add_argument("--ways", default="none,grammar,ngram")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1)
    args = parser.parse_args()
    if args.tokenizer is None:
        assets = Path(megatron_async.__file__).parent / "assets" / "tiny"
        tokenizer = Tokenizer.from_directory(assets)
    else:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(args.tokenizer)))
    torch.set_num_threads(1)
    clock = Clock()
    replace_work(clock)
    print("| rows | drafts by | to the launch | in all | tokens of a row |\n|---|---|---|---|---|")
    for rows in map(int, args.rows.split(",")):
        for way in args.ways.split(","):
            config = config_of(way, rows, args.drafts, args.depth)
            network = LittleModel(tokenizer.vocab_size, config.max_sequence_length)
            served = ServedModel(network=network, tokenizer=tokenizer)
            with DynamicInferenceEngine(served, config) as engine:
                launch, whole, tokens = measured(engine, rows, clock)
            clock.forget()
            print(f"| {rows} | {way} | {launch:.0f} | {whole:.0f} | {tokens:.2f} |", flush=True)


if __name__ == "__main__":
    main()
