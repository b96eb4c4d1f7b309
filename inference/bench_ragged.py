"""The ragged workload: requests of many lengths, some of which stop at a token, that arrive at
once or over time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.request import DynamicInferenceRequest, FinishReason, RequestFuture
from megatron_async.sampling_params import SamplingParams

from .bench_decode import profile_next
from .bench_engine import Started
from .bench_load import RaggedLoad, log_normal
from .bench_timeline import percentile

PROFILED_STEPS = 100
STOPPING = 3
"""One request in so many ends at a token id."""

STOPPING_TEMPERATURE = 1e6
"""Of those requests. Their own noise alone decides then, whatever the model: in 16 bits greedy
outputs of random weights differ from run to run, and an end token would seldom come again."""

NO_TERMINATION = -1


@dataclass(frozen=True, slots=True)
class Wish:
    """One request of the workload."""

    prompt: list[int]
    params: SamplingParams


def make_wishes(vocab_size: int, load: RaggedLoad) -> list[Wish]:
    """The requests, all of which end by their drawn length. Greedy but for those that
    :func:`with_stops` gives an end token, which are sampled from their own seeds."""
    source = random.Random(load.seed)
    wishes = []
    for number in range(load.requests):
        length = log_normal(source, *load.prompt_range)
        params = SamplingParams(
            temperature=STOPPING_TEMPERATURE if is_stopping(number) else 0,
            num_tokens_to_generate=log_normal(source, *load.output_range),
            termination_id=NO_TERMINATION,
            seed=number,
        )
        wishes.append(Wish([source.randrange(vocab_size) for _ in range(length)], params))
    return wishes


def is_stopping(number: int) -> bool:
    """Whether this request of the workload gets an end token."""
    return number % STOPPING == 1


def with_stops(wishes: Sequence[Wish], tokens: Sequence[list[int]], seed: int) -> list[Wish]:
    """``wishes`` with a termination id in those that :func:`is_stopping` names: a token of its own
    stream in ``tokens``, what a serial run decoded, that first occurs near a drawn place before
    the end."""
    source = random.Random(seed)
    stopping = list(wishes)
    for number, (wish, stream) in enumerate(zip(wishes, tokens, strict=True)):
        place = source.uniform(0, len(stream))
        first = {token: at for at, token in reversed(list(enumerate(stream)))}
        places = {at: token for token, at in first.items() if at < len(stream) - 1}
        if is_stopping(number) and places:
            stop = places[min(places, key=lambda at: abs(at - place))]
            params = dataclasses.replace(wish.params, termination_id=stop)
            stopping[number] = Wish(wish.prompt, params)
    return stopping


def shortened(wish: Wish, new_tokens: int) -> Wish:
    """``wish`` for at most ``new_tokens``."""
    most = min(wish.params.num_tokens_to_generate or new_tokens, new_tokens)
    return Wish(wish.prompt, dataclasses.replace(wish.params, num_tokens_to_generate=most))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive: Poisson at ``rate`` a second, all at once
    for an infinite one."""
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += source.expovariate(rate)
        times.append(now)
    return times


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of the workload: for each request its record, when it arrived and when each of its
    tokens was handed out, in seconds from the start."""

    requests: list[DynamicInferenceRequest]
    arrived: list[float]
    handed_out: list[list[float]]
    seconds: float
    counters: Any
    times: dict[str, float] | None

    @property
    def tokens(self) -> list[list[int]]:
        """What was generated."""
        return [request.generated_tokens for request in self.requests]

    @property
    def stopped(self) -> int:
        """Requests that ended at a token id."""
        return sum(request.finish_reason is FinishReason.STOP for request in self.requests)


def run_workload(
    made: Started, wishes: Sequence[Wish], arrived: Sequence[float], *, mark: bool
) -> Run:
    """Serve all requests once."""
    engine = made.engine
    engine.reset()
    handed_out: list[list[float]] = [[] for _ in wishes]
    futures: list[RequestFuture] = []
    cost = made.clock.host_us_per_launch() if mark else 0.0
    if mark:
        made.clock.start_marking()
    started = time.perf_counter()
    while len(futures) < len(wishes) or engine.has_unfinished_requests():
        now = time.perf_counter() - started
        while len(futures) < len(wishes) and arrived[len(futures)] <= now:
            number = len(futures)
            futures.append(engine.add_request(number, wishes[number].prompt, wishes[number].params))
        if not engine.has_unfinished_requests():
            time.sleep(min(max(arrived[len(futures)] - now, 0), 1e-3))
            continue
        outputs = engine.step_modern()["tokens"]
        now = time.perf_counter() - started
        for output in outputs:
            handed_out[output.request_id].append(now)
    seconds = time.perf_counter() - started
    times = made.clock.stop_marking() if mark else None
    return Run(
        requests=[future.result() for future in futures],
        arrived=list(arrived),
        handed_out=handed_out,
        seconds=seconds,
        counters=engine.counters,
        times=None if times is None else {**times._asdict(), "host_us_per_launch": cost},
    )


def profile_middle(
    made: Started, wishes: Sequence[Wish], output_tokens: int
) -> dict[str, float] | None:
    """The device's timeline after half of ``output_tokens``, all requests there at once; None
    where it could not be read."""
    engine = made.engine
    engine.reset()
    for number, wish in enumerate(wishes):
        engine.add_request(number, wish.prompt, wish.params)
    while engine.has_unfinished_requests() and (
        engine.counters.tokens_committed < output_tokens // 2
    ):
        engine.step_modern()
    found = profile_next(engine, PROFILED_STEPS)
    engine.reset()
    return found


def figures(run: Run) -> dict[str, Any]:
    """What a run says; times in milliseconds unless their name says otherwise."""
    counters = run.counters
    firsts = [
        1e3 * (times[0] - arrived)
        for times, arrived in zip(run.handed_out, run.arrived, strict=True)
    ]
    between = [
        1e3 * (after - before)
        for times in run.handed_out
        for before, after in itertools.pairwise(times)
    ]
    means = [
        1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in run.handed_out if times[1:]
    ]
    made = sum(map(len, run.tokens))
    asked = sum(len(request.prompt_tokens) for request in run.requests)
    steps = counters.steps_launched
    return {
        "seconds": run.seconds,
        "prompt_tokens": asked,
        "output_tokens": made,
        "output_tokens_per_second": made / run.seconds,
        "tokens_per_second": (asked + made) / run.seconds,
        **_spread("first_token_ms", firsts),
        **_spread("token_ms_request_mean", means),
        **_spread("token_ms_between", between),
        "steps": steps,
        "steps_mixed": counters.steps_with_prefill,
        "steps_decode": steps - counters.steps_with_prefill,
        "rows_mean": counters.rows_launched / steps,
        "host_ms_mean": 1e-6 * (counters.step_ns - counters.wait_ns) / steps,
        "stopped": run.stopped,
        "tokens_discarded": counters.tokens_discarded,
        "stalls": counters.stalls,
        "evictions": counters.evictions,
        "events": run.times,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile, None of nothing."""
    if not values:
        return {f"{name}_p50": None, f"{name}_p99": None}
    return {f"{name}_p50": statistics.median(values), f"{name}_p99": percentile(values, 0.99)}
