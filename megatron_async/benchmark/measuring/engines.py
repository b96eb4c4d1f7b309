"""The engines that are measured: one model, engines for a load one after the other."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.benchmark.drafts import PLAIN, Drafts
from megatron_async.benchmark.measuring.loads import HostWork, Load, RaggedLoad
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.build.runner import allocate
from megatron_async.build.spec import EngineSpec, cached_tokens
from megatron_async.cli.output.progress import show_capture
from megatron_async.config.engine_config import DEFAULT_BLOCK_SIZE_TOKENS, EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.stepping.drive import drive
from megatron_async.models.served import ModelDescription
from megatron_async.sampling_params import SamplingParams

MOST_PREFILL_TOKENS = 8192
"""Prompt tokens of one forward, where a single prompt is not longer."""

MEMORY_SHARE = 0.8
"""The share of a GPU's free memory that caches may take."""

FIRST_PROMPT_TOKENS = 16
"""Prompt tokens of the request whose first token is timed at the start."""


@dataclass(slots=True)
class Started:
    """An engine, and the seconds that it took to start it: the cache, the capture of its graphs,
    and all."""

    engine: Any
    cache_seconds: float
    capture_seconds: float
    seconds: float


def start_engine(
    model: BenchmarkModel,
    config: EngineConfig,
    work: HostWork,
) -> Started:
    """Build an engine over the model's weights, and time its parts."""
    started = time.perf_counter()
    served = model.served(work.tokenizer(model.network.vocab_size))
    batch = allocate(EngineSpec.of(served, config, model.device.type), served, model.device)
    _synchronize(model.device)
    cache_seconds = time.perf_counter() - started
    capture_seconds = 0.0

    def time_capture(captured: Iterable[int], count: int) -> Iterator[int]:
        nonlocal capture_seconds
        before = time.perf_counter()
        yield from show_capture(captured, count)
        _synchronize(model.device)
        capture_seconds = time.perf_counter() - before

    engine = DynamicInferenceEngine(
        served,
        config,
        batch=batch,
        progress=time_capture,
    )
    _synchronize(model.device)
    seconds = time.perf_counter() - started
    work.add_to(engine)
    return Started(engine, cache_seconds, capture_seconds, seconds)


def _config(
    model: BenchmarkModel, depth: int, load: Load | RaggedLoad, drafts: Drafts, **sizes: Any
) -> EngineConfig:
    return EngineConfig(
        depth=depth,
        max_sequence_length=load.longest,
        enable_prefix_caching=False,
        random_seed=load.seed,
        device=str(model.device) if model.group is None else model.device.type,
        pipeline_micro_batches=model.micro_batches,
        kv_cache_dtype=model.kv_cache_dtype,
        late_planning=model.late_planning,
        gemm_autotune_seconds=model.gemm_autotune_seconds,
        **drafts.config,
        **sizes,
    )


def _blocks_of_row(load: Load | RaggedLoad, depth: int, drafts: Drafts) -> int:
    """Admission keeps a block to spare for each running request, and whole windows get blocks."""
    ahead = (depth + 2) * drafts.window if drafts.count else 0
    return -(-(load.longest + ahead) // DEFAULT_BLOCK_SIZE_TOKENS) + 1


def decode_config(
    model: BenchmarkModel,
    rows: int,
    depth: int,
    load: Load,
    drafts: Drafts = PLAIN,
    *,
    all_buckets: bool = False,
    most_prefill: int | None = None,
    spare_rows: int = 0,
) -> EngineConfig:
    """The configuration for exactly this work: the cache holds ``rows`` requests at full length,
    and ``spare_rows`` more; ``most_prefill`` tokens are prefilled at once."""
    most_prefill = MOST_PREFILL_TOKENS if most_prefill is None else most_prefill
    return _config(
        model,
        depth,
        load,
        drafts,
        max_requests=rows,
        max_tokens=rows * drafts.window
        + max(load.prompt_tokens, min(rows * load.prompt_tokens, most_prefill)),
        block_count=(rows + spare_rows) * _blocks_of_row(load, depth, drafts),
        prefill_chunk_tokens=load.prompt_tokens,
        num_cuda_graphs=None if all_buckets else 1,
    )


def ragged_config(
    model: BenchmarkModel, depth: int, load: RaggedLoad, drafts: Drafts = PLAIN
) -> EngineConfig:
    """Every row bucket is captured. Unless the load says how large, the cache holds all rows at
    full length, or on a GPU what fits into the free memory."""
    blocks = load.block_count
    if blocks is None:
        of_row = _blocks_of_row(load, depth, drafts)
        blocks = load.max_requests * of_row
        if model.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(model.device)
            block_bytes = DEFAULT_BLOCK_SIZE_TOKENS * _token_bytes(model, drafts)
            blocks = max(min(blocks, int(MEMORY_SHARE * free) // max(block_bytes, 1)), of_row)
    sizes = {"max_requests": load.max_requests, "block_count": blocks}
    return _config(model, depth, load, drafts, **sizes)


def _token_bytes(model: BenchmarkModel, drafts: Drafts) -> int:
    """Return the bytes a token takes in the KV cache, that of a model that drafts included."""
    described = ModelDescription.of(model.network)
    draft = None if model.draft is None else ModelDescription.of(model.draft)
    spec, further = cached_tokens(described, draft, EngineConfig(**drafts.config))
    return spec.token_bytes + further


def make_engine(
    model: BenchmarkModel,
    rows: int,
    depth: int,
    load: Load,
    drafts: Drafts = PLAIN,
    *,
    all_buckets: bool = False,
) -> Started:
    """An engine of the decode workload, started."""
    config = decode_config(model, rows, depth, load, drafts, all_buckets=all_buckets)
    return start_engine(model, config, load)


def fit_together(
    model: BenchmarkModel, batch_size: int, engines: Sequence[tuple[int, Drafts]], load: Load
) -> bool:
    """Whether engines of the decode workload, each of a depth and its drafts, fit into a GPU's free
    memory at once."""
    if model.device.type != "cuda":
        return True
    needed = 0
    for depth, drafts in engines:
        config = decode_config(model, batch_size, depth, load, drafts)
        tokens = (config.block_count or 0) * DEFAULT_BLOCK_SIZE_TOKENS
        needed += tokens * _token_bytes(model, drafts)
        needed += 3 * 4 * batch_size * drafts.window * model.config.vocab_size
    return needed < MEMORY_SHARE * torch.cuda.mem_get_info(model.device)[0]


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
    torch.cuda.empty_cache()


def measure_startup(
    model: BenchmarkModel, config: EngineConfig, build_again: Callable[[], object] | None
) -> dict[str, Any]:
    """Seconds of each phase of two starts. To be called before anything else has run: the first
    start compiles kernels, or reads them from the caches on disk.

    ``model``: build or load the weights, by ``build_again`` the second time, None where that is not
    measured; ``cache``: the KV cache and per-slot state; ``capture``:
    the graphs of all row buckets, kernels' compilation included; ``rest``: rings, scheduler;
    ``first token``: of one short request, from ``add_request`` on.
    """
    names = ("model", "cache", "capture", "rest", "first token")
    phases: dict[str, list[float | None]] = {name: [] for name in names}
    for _ in range(2):
        one = start_engine(model, config, HostWork())
        phases["cache"].append(one.cache_seconds)
        phases["capture"].append(one.capture_seconds)
        phases["rest"].append(one.seconds - one.cache_seconds - one.capture_seconds)
        phases["first token"].append(_first_token_seconds(one.engine, model.network.vocab_size))
        graphs = one.engine.runner.graph_count
        close_engines([one])
    again = None
    if build_again is not None:
        started = time.perf_counter()
        build_again()
        again = time.perf_counter() - started
        free_memory()
    phases["model"] = [model.build_seconds, again]
    total = [_sum(of_start) for of_start in zip(*phases.values(), strict=True)]
    sizes = {"graphs": graphs, "max_requests": config.max_requests}
    return {"phases": phases, "total": total, **sizes}


def _sum(seconds: Iterable[float | None]) -> float | None:
    """None where a part was not measured."""
    known = list(seconds)
    return None if None in known else sum(filter(None, known))


def _first_token_seconds(engine: Any, vocab_size: int) -> float:
    length = min(FIRST_PROMPT_TOKENS, engine.max_sequence_length - 2)
    prompt = [n % vocab_size for n in range(length)]
    params = SamplingParams(temperature=0, num_tokens_to_generate=2, termination_id=-1)
    started = time.perf_counter()
    engine.add_request(0, prompt, params)
    times = [time.perf_counter() - started for step in drive(engine) if step["tokens"]]
    return times[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
