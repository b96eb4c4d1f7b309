"""The decode workload: rounds of steps in which every row decodes."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from megatron_async.errors import MegatronAsyncError
from megatron_async.sampling_params import SamplingParams

from .bench_engine import Started
from .bench_load import Load, prompts
from .bench_timeline import WINDOWS_SKIPPED, Timeline, analyse, profile

PROFILED_STEPS = 50
WARM_UP_TOKENS = 12


class NoSteadyStepsError(MegatronAsyncError):
    """A batch is so large that its first requests end before its last ones decode."""


class Round(NamedTuple):
    """Steady decode steps: nanoseconds from the end of one to the end of the next, and of the
    step the part that the host was not blocked on the device."""

    step_ns: list[int]
    host_ns: list[int]


def least_new_tokens(depths: list[int]) -> int:
    """Tokens to generate for which some steady steps are left."""
    return 2 * max(depths) + 12


def start(engine: Any, batch_size: int, load: Load, new_tokens: int) -> None:
    """Reset the engine and queue one request for each row."""
    engine.reset()
    vocab_size = engine.controller.inference_wrapped_model.vocab_size
    params = SamplingParams(
        temperature=load.temperature,
        top_k=load.top_k,
        top_p=load.top_p,
        num_tokens_to_generate=new_tokens,
        termination_id=-1,
    )
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
        NoSteadyStepsError: the load is too short for such a batch.
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
        raise NoSteadyStepsError("no step decoded all rows together; raise --new-tokens")
    return Round([ends[n] - ends[n - 1] for n in steady], [hosts[n] for n in steady])


def run_marked_round(made: Started, batch_size: int, load: Load) -> tuple[Round, Any]:
    """:func:`run_round` with a mark around each launch: the round, and what the marks say of the
    time after the prefill, plain JSON, or None."""
    cost = made.clock.host_us_per_launch()
    made.clock.start_marking()
    found = run_round(made.engine, batch_size, load)
    times = made.clock.stop_marking(after_prefill=True)
    if times is None:
        return found, None
    return found, {**times._asdict(), "host_us_per_launch": cost}


def profile_steps(engine: Any, batch_size: int, load: Load) -> dict[str, float] | None:
    """The device's timeline of up to ``PROFILED_STEPS`` steps in the middle of the load, and the
    device allocations made in a step; None where no step could be told from the next.

    Times in it hold the profiler's own cost: compare gaps and shares, not milliseconds.
    """
    start(engine, batch_size, load, load.new_tokens)
    count = min(PROFILED_STEPS + WINDOWS_SKIPPED, load.new_tokens - 2 * engine.depth - 6)
    for _ in range((load.new_tokens - count) // 2 + engine.depth + 2):
        engine.step_modern()
    found = profile_next(engine, count)
    engine.reset()
    return found


def profile_next(engine: Any, count: int) -> dict[str, float] | None:
    """The timeline of the engine's next ``count`` steps, and device allocations a step."""
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
    if timeline is None:
        return None
    return {**timeline._asdict(), "device_allocations_per_step": allocations / count}


def _allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
