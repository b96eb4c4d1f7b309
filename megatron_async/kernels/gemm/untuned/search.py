"""Tile configs that a search for the best one (``megatron-async tune``) tries."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

from megatron_async.kernels.gemm.tile_choice import (
    balanced_configs,
    candidates,
    mma_tile_shapes,
    tma_tile_shapes,
)
from megatron_async.kernels.gemm.tile_config import (
    FEW_ROWS,
    SHARED_BYTES,
    GemmProblem,
    TileConfig,
    is_of_many_rows,
    measured,
)
from megatron_async.kernels.gemm.untuned.ranking import ranked, widens_for_wgmma


def known_configs(n: int, k: int) -> list[TileConfig]:
    """What was measured for a weight of this shape, at any number of rows."""
    found = [e.config for e in measured().values() if (e.problem.n, e.problem.k) == (n, k)]
    return list(dict.fromkeys(found))


def tma_configs(n: int, sm_count: int) -> Iterator[TileConfig]:
    """wgmma configs, with all numbers of stages."""
    for shape, stages in itertools.product(tma_tile_shapes(n, sm_count), range(2, 11)):
        yield shape._replace(stages=stages)


def spread(
    problem: GemmProblem, count: int, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """Some mma configs at random, and as many wgmma configs; with inputs in e4m3 these alone."""
    rows, n, k, norm, epilogue, scale_columns, e4m3_inputs = problem
    assert norm is not None and epilogue is not None
    by_mma = candidates(
        n, k, rows, norm, epilogue, sm_count=sm_count, limit=limit, scale_columns=scale_columns
    )
    found = [[] if e4m3_inputs else list(by_mma), []]
    if tma:
        found[1] = [each for each in tma_configs(n, sm_count) if each.can_serve(problem, limit)]
    for some in found:
        random.Random(0).shuffle(some)
    return [config for some in found for config in some[:count]]


def deepest(
    problem: GemmProblem, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """Return, by wgmma tile shape, the config with most stages: with one CTA on an SM, and two.

    Raises:
        ValueError: there is none.
    """
    found: dict[TileConfig, None] = {}
    for share in (limit, limit // 2):
        by_shape = {}
        for config in tma_configs(problem.n, sm_count) if tma else ():
            if config.can_serve(problem, share):
                by_shape[config._replace(stages=0)] = config  # the most stages come last
        found.update(dict.fromkeys(by_shape.values()))
    if not found:
        raise ValueError(f"no kernel for {problem.n} x {problem.k} at {problem.rows} rows")
    return list(found)


def balanced(
    problem: GemmProblem, count: int, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """Return of :func:`balanced_configs` the first ``count`` by mma, and half as many by wgmma: at
    most three that divide the weight in the same way."""
    rows, n, k, norm, epilogue, scale_columns, _ = problem
    assert norm is not None and epilogue is not None
    by_tma = tma_tile_shapes(n, sm_count) if tma else ()
    chosen: list[TileConfig] = []
    for shapes, most in ((mma_tile_shapes(n, sm_count), count), (by_tma, count // 2)):
        taken: Counter[tuple[int, int]] = Counter()
        for config in balanced_configs(
            shapes, n, k, rows, norm, epilogue, sm_count=sm_count, limit=limit,
            scale_columns=scale_columns,
        ):  # fmt: skip
            alike = config.weight_rows, config.split_k
            if taken[alike] < 3 and taken.total() < most:
                taken[alike] += 1
                chosen.append(config)
    return chosen


def short_list(
    problem: GemmProblem, count: int, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """The configs of :func:`balanced` and of other numbers of rows; for many rows, and with inputs
    in e4m3, all with TMA."""
    by_wgmma = any(config.can_serve(problem, limit) for config in tma_configs(problem.n, sm_count))
    if is_of_many_rows(problem.rows, problem.scale_columns):
        found = list(ranked(problem, tma=tma, sm_count=sm_count, limit=limit))[: 2 * count]
        if problem.rows <= FEW_ROWS and by_wgmma and tma:
            found += deepest(problem, tma=tma, sm_count=sm_count, limit=limit)
        return found
    if problem.e4m3_inputs and not by_wgmma:  # the weight does not fill the GPU
        return list(ranked(problem, tma=tma, sm_count=sm_count, limit=limit))
    if problem.e4m3_inputs:
        return deepest(problem, tma=tma, sm_count=sm_count, limit=limit)
    found = known_configs(problem.n, problem.k)
    if tma and widens_for_wgmma(problem):
        found += ranked(problem, tma=tma, sm_count=sm_count, limit=limit)[:count]
    return [*found, *balanced(problem, count, tma=tma, sm_count=sm_count, limit=limit)]


def neighbours(config: TileConfig) -> Iterator[TileConfig]:
    """The configs that differ in one field, or that trade one against another."""
    yield from (config._replace(stages=s) for s in range(2, 14))
    yield from (config._replace(warps_n=w) for w in range(1, 17))
    yield from (config._replace(row_tiles=r) for r in range(1, 17 if config.tma else 5))
    yield from (config._replace(split_k=s) for s in (1, 2, 3, 4, 6, 8))
    yield from (config._replace(warps_k=w) for w in (1, 2, 4, 8, 16))
    yield from (config._replace(multicast=m) for m in (1, 2, 4) if config.multicast)
    yield config._replace(stream_x=not config.stream_x)
    yield config._replace(workspace=not config.workspace)
    tiles = config.row_tiles * config.warps_n
    if config.tma:
        yield config._replace(row_tiles=1, warps_n=config.row_tiles, tma=False)
    else:
        yield config._replace(row_tiles=tiles, warps_n=1, warps_k=1, stream_x=True, tma=True)
    if config.row_tiles > 1:
        yield config._replace(row_tiles=1, warps_n=tiles)
    if config.warps_n % 2 == 0:
        half = config.warps_n // 2
        yield config._replace(row_tiles=2 * config.row_tiles, warps_n=half)
        yield config._replace(warps_n=half, warps_k=2 * config.warps_k)
