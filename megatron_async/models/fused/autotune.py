"""Tuning at the start of an engine: a few seconds for the GEMMs that nobody has measured.

Of each GEMM and number of rows that neither the built-in table nor the user's has, the configs that
are ranked best are compiled side by side and timed, and the fastest is kept in the user's table,
where ``megatron-async tune`` keeps its own. What the seconds do not reach keeps the estimated
config, and its turn comes with the next start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from megatron_async.errors import ConfigError
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_choice import find
from megatron_async.kernels.gemm.tile_config import (
    ANY_SHAPE_ROWS,
    FEW_ROWS,
    MAX_ROWS,
    MEASURED,
    TUNED,
    Entry,
    GemmProblem,
    TileConfig,
    lookup,
    padded,
    save_tuned,
)
from megatron_async.kernels.gemm.untuned.ranking import short_ranking
from megatron_async.kernels.gemm.untuned.timing import TimedGemm, bytes_needed, random_weights
from megatron_async.models.fused.blocks.gemms import Gemm
from megatron_async.models.fused.decoder import FusedDecoder

logger = logging.getLogger(__name__)

CANDIDATES = 8
"""Configs of a GEMM that are timed, beside the one that it would take."""
ROWS = (1, 32, 8, 16, 64, 128, 4, 2, 48)
"""Padded rows of a step, those first whose times matter most."""


class Open(NamedTuple):
    """A GEMM that nobody has measured, and configs to time: first the one that it would take."""

    problem: GemmProblem
    gemm: Gemm
    configs: tuple[TileConfig, ...]


class Tuned(NamedTuple):
    """What the seconds brought: the fastest configs, and how many GEMMs were left out."""

    found: dict[GemmProblem, TileConfig]
    left: int


def open_problems(gemms: Mapping[str, Gemm], rows: Iterable[int]) -> Iterator[Open]:
    """The GEMMs of steps of ``rows`` rows that nobody has measured, with configs to time."""
    sizes = {padded(each) for each in rows if 0 < each <= MAX_ROWS}
    seen: set[GemmProblem] = set()
    for size in sorted(sizes, key=ROWS.index):
        for gemm in gemms.values():
            problem = gemm.case(size)
            # The estimate of these is near, and a start has few seconds.
            too_many = ANY_SHAPE_ROWS < size <= FEW_ROWS and not gemm.scale_columns
            if too_many or problem in seen or is_measured(gemm, problem):
                continue
            seen.add(problem)
            used = gemm.tiling(size)
            others = short_ranking(
                problem, CANDIDATES, tma=gemm.tma, sm_count=gemm.sm_count, limit=gemm.limit
            )
            configs = tuple(dict.fromkeys([*([] if used is None else [used]), *others]))
            if configs:
                yield Open(problem, gemm, configs)


def is_measured(gemm: Gemm, problem: GemmProblem) -> bool:
    """Whether a table says what is fastest, here or for like rows."""
    if gemm.fixed is not None or lookup(gemm.found, problem) is not None:
        return True
    entry = find(problem, gemm.tma, sm_count=gemm.sm_count, limit=gemm.limit)
    return entry is not None and entry.source == MEASURED


def tune(decoder: FusedDecoder, rows: Iterable[int], seconds: float, device: torch.device) -> Tuned:
    """Time what nobody has measured, for about ``seconds`` at most: a GEMM is begun only if the
    slowest one so far would end in time."""
    end = time.monotonic() + seconds
    todo = list(open_problems(decoder.gemms, rows))
    found: dict[GemmProblem, TileConfig] = {}
    if not todo:
        return Tuned(found, 0)
    try:
        memory = random_weights(max(bytes_needed(each.problem) for each in todo), device)
    except torch.OutOfMemoryError:
        logger.warning("GEMMs are not tuned: the GPU has too little free memory; lower the cache's")
        return Tuned(found, len(todo))
    slowest = 0.0
    ahead = ThreadPoolExecutor(1)
    compiled = _compile_ahead(ahead, decoder, todo, device)
    try:
        for each in todo:
            begun = time.monotonic()
            if begun + slowest > end:
                break
            next(compiled).exception()  # one that does not compile is left out when it is timed
            best = fastest(each, decoder.reader, memory)
            if best is not None:
                found[each.problem] = best
            slowest = max(slowest, time.monotonic() - begun)
    finally:
        ahead.shutdown(cancel_futures=True)
        # What steps allocate is another stream's, and an engine that sleeps holds none of this.
        del memory
        torch.cuda.empty_cache()
    return Tuned(found, len(todo) - len(found))


def _compile_ahead(
    pool: ThreadPoolExecutor, decoder: FusedDecoder, todo: Sequence[Open], device: torch.device
) -> Iterator[Future[None]]:
    """The kernels of one GEMM after the other; those of the next compile while one is timed."""

    def start(each: Open) -> Future[None]:
        size = each.problem.rows
        work = [(c.kernel, decoder.defines(each.gemm, size, c)) for c in each.configs]
        return pool.submit(cuda.compile_together, work, cuda.architecture(device.index or 0))

    waiting = start(todo[0])
    for each in todo[1:]:
        following = start(each)
        yield waiting
        waiting = following
    yield waiting


def fastest(each: Open, reader: int, memory: torch.Tensor) -> TileConfig | None:
    """The fastest of the configs; None if none works."""
    timed = TimedGemm(each.problem, reader, memory)
    best: tuple[float, TileConfig | None] = (math.inf, None)
    for config in each.configs:
        try:
            us = timed.time_us(config)
        except (ArithmeticError, ConfigError, RuntimeError) as error:
            logger.info("%s is not used for %s: %s", config, each.problem, str(error)[:200])
            continue
        if us < best[0]:
            best = us, config
    return best[1]


def tune_and_keep(
    decoder: FusedDecoder, rows: Sequence[int], seconds: float, device: torch.device, ranks: Any
) -> None:
    """Tune a decoder's GEMMs before they are captured, and keep what is found for later starts.

    Of ranks that have the same layers one measures, and all take what it has found, so that they
    compute alike.

    Args:
        ranks: a :class:`~megatron_async.models.parallel.ModelParallel`; None for one rank.
    """
    begun, gpu = time.monotonic(), cuda.device_name(device.index or 0)
    measures = ranks is None or ranks.tensor_rank == ranks.expert_rank == 0
    if measures:
        tuned = tune(decoder, rows, seconds, device)
        decoder.adopt(tuned.found)
        if tuned.found:
            path = _keep(gpu, tuned.found)
            logger.info(
                "%d GEMMs were tuned in %.1f s and kept in %s; %d are left for the next start",
                len(tuned.found), time.monotonic() - begun, path, tuned.left,
            )  # fmt: skip
    if ranks is not None and ranks.layout.stage_ranks > 1:
        decoder.adopt(_share(decoder, rows, ranks, device, measures=measures))


def _keep(gpu: str, found: Mapping[GemmProblem, TileConfig]) -> object:
    """The file in which the configs are kept; engines run without it too."""
    try:
        return save_tuned(gpu, [Entry(*each, TUNED) for each in found.items()])
    except ConfigError as error:
        logger.warning("tile configs are tuned at each start: %s", error)
        return "no file"


def _share(
    decoder: FusedDecoder, rows: Sequence[int], ranks: Any, device: torch.device, *, measures: bool
) -> dict[GemmProblem, TileConfig | None]:
    """What the rank that measures uses of each GEMM, None where it has no kernel: all ranks of a
    stage have the same GEMMs."""
    sizes = sorted({padded(each) for each in rows if 0 < each <= MAX_ROWS})
    cases = [(gemm, gemm.case(size)) for gemm in decoder.gemms.values() for size in sizes]
    used = torch.zeros(len(cases), len(TileConfig._fields), dtype=torch.int64)
    if measures:
        for row, (gemm, problem) in enumerate(cases):
            config = gemm.tiling(problem.rows)
            if config is not None:
                used[row] = torch.tensor([int(value) for value in config])
    shared = ranks.sum_experts_(used.to(device)).tolist()
    return {
        problem: _config_of(numbers) if any(numbers) else None
        for (_, problem), numbers in zip(cases, shared, strict=True)
    }


def _config_of(numbers: Sequence[Any]) -> TileConfig:
    """A config from its fields."""
    config = TileConfig(*numbers[:5], *map(bool, numbers[5:9]))
    return config._replace(multicast=numbers[9])
