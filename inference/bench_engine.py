"""The engines that ``bench`` measures, and one round of steps on one of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_async.assembly import build_context
from megatron_async.config import EngineConfig
from megatron_async.controller import TextGenerationController
from megatron_async.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.models.config import ModelConfig
from megatron_async.requests import SamplingParams

from .bench_timeline import WINDOWS_SKIPPED, Timeline, analyse, profile

if TYPE_CHECKING:
    from megatron_async.models.wrapper import GPTInferenceWrapper

MOST_PREFILL_TOKENS = 8192
"""Prompt tokens of one forward, where a single prompt is not longer."""

PROFILED_STEPS = 50
WARM_UP_TOKENS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work of every measurement: ``host_work_us`` is spent at each commit, ``stall_us`` at
    every ``stall_every``-th, both spinning, as Python code would."""

    prompt_tokens: int
    new_tokens: int
    host_work_us: float = 0.0
    stall_us: float = 0.0
    stall_every: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model all engines share, and what it is."""

    name: str
    config: ModelConfig
    wrapper: GPTInferenceWrapper
    device: torch.device
    dtype: torch.dtype
    build_seconds: float


class Round(NamedTuple):
    """Steady decode steps: nanoseconds from the end of one to the end of the next, and of the
    step the part that the host was not blocked on the device."""

    step_ns: list[int]
    host_ns: list[int]


def least_new_tokens(depths: list[int]) -> int:
    """Tokens to generate for which some steady steps are left."""
    return 2 * max(depths) + 12


def make_engine(subject: Subject, batch_size: int, depth: int, load: Load) -> tuple[Any, float]:
    """An engine for exactly this work, and the seconds that it took to start it.

    The cache holds the batch at full length and no more; one row bucket is captured.
    """
    started = time.perf_counter()
    length = load.prompt_tokens + load.new_tokens
    block_size = EngineConfig().block_size_tokens
    prefill = max(load.prompt_tokens, min(batch_size * load.prompt_tokens, MOST_PREFILL_TOKENS))
    config = EngineConfig(
        inference_async_scheduling=depth > 0,
        depth=depth,
        max_requests=batch_size,
        max_tokens=batch_size + prefill,
        max_sequence_length=length,
        # Admission keeps a block to spare for each running request.
        block_count=batch_size * (-(-length // block_size) + 1),
        prefill_chunk_tokens=load.prompt_tokens,
        enable_prefix_caching=False,
        num_cuda_graphs=1,
        random_seed=load.seed,
        device=str(subject.device),
    )
    engine = DynamicInferenceEngine(
        TextGenerationController(subject.wrapper),
        build_context(subject.wrapper, config, subject.device),
        config=config,
        model_name=subject.name,
    )
    _synchronize(subject.device)
    seconds = time.perf_counter() - started
    add_host_work(engine, load)
    return engine, seconds


def close_engines(engines: list[Any]) -> None:
    """Give back graphs and caches, so that the next engines find the memory free."""
    for engine in engines:
        engine.close()
    engines.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def add_host_work(engine: Any, load: Load) -> None:
    """Spend ``load``'s host time in each commit of ``engine``. The one place that knows how."""
    if not load.host_work_us and not load.stall_us:
        return
    commit: Callable[..., None] = engine._commit
    commits = 0

    def slow_commit(*args: Any, **kwargs: Any) -> None:
        nonlocal commits
        commits += 1
        stalls = load.stall_every and commits % load.stall_every == 0
        spin_us(load.host_work_us + (load.stall_us if stalls else 0.0))
        commit(*args, **kwargs)

    engine._commit = slow_commit


def spin_us(microseconds: float) -> None:
    """Keep the host's thread busy."""
    until = time.perf_counter_ns() + int(microseconds * 1e3)
    while time.perf_counter_ns() < until:
        pass


def prompts(vocab_size: int, batch_size: int, load: Load) -> list[list[int]]:
    """Random token ids, the same for all depths and rounds."""
    source = random.Random(load.seed)
    return [
        [source.randrange(vocab_size) for _ in range(load.prompt_tokens)] for _ in range(batch_size)
    ]


def start(engine: Any, batch_size: int, load: Load, new_tokens: int) -> None:
    """Reset the engine and queue one request for each row."""
    engine.reset()
    vocab_size = engine.controller.inference_wrapped_model.vocab_size
    params = SamplingParams(temperature=0, num_tokens_to_generate=new_tokens, termination_id=-1)
    for number, prompt in enumerate(prompts(vocab_size, batch_size, load)):
        engine.add_request(number, prompt, params)


def warm_up(engine: Any, batch_size: int, load: Load) -> None:
    """Decode a little, so that no kernel is compiled in what is timed."""
    start(engine, batch_size, load, min(load.new_tokens, WARM_UP_TOKENS))
    while engine.has_unfinished_requests():
        engine.step_modern()


def run_round(engine: Any, batch_size: int, load: Load) -> Round:
    """Decode the whole load once. Steady steps commit a token of every row; the first few of them
    fill the chain, and the last drain it: neither is counted.

    Raises:
        ConfigError: the load is too short to have steady steps.
    """
    start(engine, batch_size, load, load.new_tokens)
    counters = engine.counters
    ends: list[int] = []
    hosts: list[int] = []
    tokens: list[int] = []
    busy_before = 0
    while engine.has_unfinished_requests():
        committed = len(engine.step_modern()["tokens"])
        ends.append(time.perf_counter_ns())
        busy = counters.step_ns - counters.wait_ns
        hosts.append(busy - busy_before)
        tokens.append(committed)
        busy_before = busy
    full = [n for n, count in enumerate(tokens) if count == batch_size]
    steady = full[engine.depth + 4 : len(full) - engine.depth - 1]
    if not steady:
        raise ConfigError("no step decoded all rows together; raise --new-tokens")
    return Round([ends[n] - ends[n - 1] for n in steady], [hosts[n] for n in steady])


def profile_steps(engine: Any, batch_size: int, load: Load) -> dict[str, float] | None:
    """The device's timeline of up to ``PROFILED_STEPS`` steps in the middle of the load, and the
    device allocations made in a step; None where no step could be told from the next.

    Times in it hold the profiler's own cost: compare gaps and shares, not milliseconds.
    """
    start(engine, batch_size, load, load.new_tokens)
    count = min(PROFILED_STEPS + WINDOWS_SKIPPED, load.new_tokens - 2 * engine.depth - 6)
    for _ in range((load.new_tokens - count) // 2 + engine.depth + 2):
        engine.step_modern()
    device = engine.device.torch_device
    allocations = 0

    def steps() -> None:
        nonlocal allocations
        before = _allocations(device)
        for _ in range(count):
            engine.step_modern()
        allocations = _allocations(device) - before
        engine.device.synchronize()

    timeline: Timeline | None = analyse(profile(steps), skip=WINDOWS_SKIPPED)
    engine.reset()
    if timeline is None:
        return None
    return {**timeline._asdict(), "device_allocations_per_step": allocations / count}


def _allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
