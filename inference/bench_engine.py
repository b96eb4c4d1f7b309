"""The engines that ``bench`` measures: one model, engines for a load one after the other."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.config import EngineConfig
from megatron_async.device import open_device
from megatron_async.engine.build import build_context
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.runner.controller import TextGenerationController

from .bench_clock import TimedDevice
from .bench_load import HostWork, Load, RaggedLoad, add_host_work
from .subject import Subject

MOST_PREFILL_TOKENS = 8192
"""Prompt tokens of one forward, where a single prompt is not longer."""

MEMORY_SHARE = 0.8
"""Of the free memory of a GPU: what caches may take."""


@dataclass(kw_only=True, slots=True)
class Started:
    """An engine, and the seconds that it took to start it: the cache, the capture of its graphs,
    and all. ``graphs`` counts these."""

    engine: Any
    clock: TimedDevice
    cache_seconds: float
    capture_seconds: float
    seconds: float
    graphs: int


def start_engine(subject: Subject, config: EngineConfig, work: HostWork) -> Started:
    """Build an engine over the subject's weights, and time its parts."""
    started = time.perf_counter()
    context = build_context(subject.wrapper, config, subject.device)
    _synchronize(subject.device)
    cache_seconds = time.perf_counter() - started
    clock = TimedDevice(open_device(subject.device, config))
    capture_seconds = 0.0

    def time_capture(captured: Iterable[int], count: int) -> Iterator[int]:
        nonlocal capture_seconds
        before = time.perf_counter()
        yield from captured
        _synchronize(subject.device)
        capture_seconds = time.perf_counter() - before

    controller = TextGenerationController(subject.wrapper)
    engine = DynamicInferenceEngine(
        controller,
        context,
        config=config,
        model_name=subject.name,
        device=clock,
        progress=time_capture,
    )
    _synchronize(subject.device)
    seconds = time.perf_counter() - started
    add_host_work(engine, work)
    return Started(
        engine=engine,
        clock=clock,
        cache_seconds=cache_seconds,
        capture_seconds=capture_seconds,
        seconds=seconds,
        graphs=engine.runner.graph_count,
    )


def decode_config(
    subject: Subject, batch_size: int, depth: int, load: Load, *, all_buckets: bool = False
) -> EngineConfig:
    """For exactly this work: the cache holds the batch at full length and no more."""
    block_size = EngineConfig().block_size_tokens
    prefill = max(load.prompt_tokens, min(batch_size * load.prompt_tokens, MOST_PREFILL_TOKENS))
    return EngineConfig(
        inference_async_scheduling=depth > 0,
        depth=depth,
        max_requests=batch_size,
        max_tokens=batch_size + prefill,
        max_sequence_length=load.longest,
        # Admission keeps a block to spare for each running request.
        block_count=batch_size * (-(-load.longest // block_size) + 1),
        prefill_chunk_tokens=load.prompt_tokens,
        enable_prefix_caching=False,
        num_cuda_graphs=None if all_buckets else 1,
        random_seed=load.seed,
        device=str(subject.device),
    )


def ragged_config(subject: Subject, depth: int, load: RaggedLoad) -> EngineConfig:
    """Every row bucket is captured. Unless the load says how large, the cache holds all rows at
    full length, or on a GPU what fits into the free memory."""
    block_size = EngineConfig().block_size_tokens
    blocks = load.block_count
    if blocks is None:
        each = -(-load.longest // block_size) + 1
        blocks = load.max_requests * each
        if subject.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(subject.device)
            fitting = int(MEMORY_SHARE * free) // (block_size * token_bytes(subject))
            blocks = max(min(blocks, fitting), each)
    return EngineConfig(
        inference_async_scheduling=depth > 0,
        depth=depth,
        max_requests=load.max_requests,
        max_sequence_length=load.longest,
        block_count=blocks,
        enable_prefix_caching=False,
        random_seed=load.seed,
        device=str(subject.device),
    )


def make_engine(
    subject: Subject, batch_size: int, depth: int, load: Load, *, all_buckets: bool = False
) -> Started:
    """An engine of the decode workload, started."""
    config = decode_config(subject, batch_size, depth, load, all_buckets=all_buckets)
    return start_engine(subject, config, load)


def token_bytes(subject: Subject) -> int:
    """Bytes of the keys and values of one token."""
    spec = subject.wrapper.kv_cache_spec
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


def fit_together(subject: Subject, batch_size: int, count: int, load: Load) -> bool:
    """Whether ``count`` engines of the decode workload fit into a GPU's free memory at once."""
    if subject.device.type != "cuda":
        return True
    config = decode_config(subject, batch_size, 0, load)
    cache = (config.block_count or 0) * config.block_size_tokens * token_bytes(subject)
    logits = 3 * 4 * batch_size * subject.config.vocab_size
    return count * (cache + logits) < MEMORY_SHARE * torch.cuda.mem_get_info(subject.device)[0]


def close_engines(made: list[Started]) -> None:
    """Give back graphs and caches, so that the next engines find the memory free. A device that
    has failed cannot be closed: its error has been told, and must not be hidden by the next."""
    for one in made:
        with contextlib.suppress(RuntimeError):
            one.engine.close()
        one.engine = None
    made.clear()
    with contextlib.suppress(RuntimeError):
        free_memory()


def free_memory() -> None:
    """Give what nobody holds back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
