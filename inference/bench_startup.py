"""How long starting takes: each phase, the first and the second time in a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron_async.config import EngineConfig
from megatron_async.sampling_params import SamplingParams

from .bench_engine import close_engines, free_memory, start_engine
from .bench_load import HostWork
from .subject import Subject

FIRST_PROMPT_TOKENS = 16


def measure_startup(
    subject: Subject, config: EngineConfig, build_again: Callable[[], object]
) -> dict[str, Any]:
    """Seconds of each phase of two starts. To be called before anything else has run: the first
    start compiles kernels, or reads them from the caches on disk.

    ``model``: build or load the weights; ``cache``: the KV cache and per-slot state; ``capture``:
    the graphs of all row buckets, kernels' compilation included; ``rest``: rings, scheduler;
    ``first token``: of one short request, from ``add_request`` on.
    """
    phases: dict[str, list[float]] = {"model": [subject.build_seconds]}
    graphs = 0
    for _ in range(2):
        made = [start_engine(subject, config, HostWork())]
        one = made[0]
        seconds = {
            "cache": one.cache_seconds,
            "capture": one.capture_seconds,
            "rest": one.seconds - one.cache_seconds - one.capture_seconds,
            "first token": _first_token_seconds(one.engine, subject.config.vocab_size),
        }
        graphs = one.graphs
        del one
        close_engines(made)
        for name, value in seconds.items():
            phases.setdefault(name, []).append(value)
    started = time.perf_counter()
    build_again()
    phases["model"].append(time.perf_counter() - started)
    free_memory()
    return {
        "phases": phases,
        "total": [sum(values[n] for values in phases.values()) for n in range(2)],
        "graphs": graphs,
        "max_requests": config.max_requests,
    }


def _first_token_seconds(engine: Any, vocab_size: int) -> float:
    length = min(FIRST_PROMPT_TOKENS, engine.max_sequence_length - 2)
    prompt = [n % vocab_size for n in range(length)]
    params = SamplingParams(temperature=0, num_tokens_to_generate=2, termination_id=-1)
    started = time.perf_counter()
    engine.add_request(0, prompt, params)
    seconds = None
    while engine.has_unfinished_requests():
        tokens = engine.step_modern()["tokens"]
        if tokens and seconds is None:
            seconds = time.perf_counter() - started
    return time.perf_counter() - started if seconds is None else seconds
