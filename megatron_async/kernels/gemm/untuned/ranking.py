"""Tile configs of a skinny GEMM that nobody measured, ranked by an estimate of its time.

The estimate follows what a GEMM of few rows waits for: all bytes of the weight through memory, and
the SM that has most of them; x, which each CTA reads for itself, through the L2 cache; partial sums
of split K; and how long the first bytes take. Its constants were fitted to times on an H200.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    SHARED_BYTES,
    SILU_GATE,
    GemmProblem,
    TileConfig,
    row_groups,
    stage_columns,
)

_SPLITS = (1, 2, 3, 4, 6, 8)
_WARPS = tuple(
    (warps_n, warps_k)
    for warps_n, warps_k in itertools.product(
        (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16), (1, 2, 4, 8)
    )
    if 4 <= warps_n * warps_k <= 16
)
_MOST_STAGES = 14


class Constants(NamedTuple):
    """Of a GPU with 132 SMs; times in microseconds, rates in bytes a microsecond.

    Args:
        memory: rate of all SMs together, from memory.
        sm: of one SM at most.
        l2: of all SMs together, from the L2 cache.
        latency: until bytes that were asked for are there.
        begin: of a launch.
        tile: of a further tile, or wave.
        split, workspace, warps_k: of sums over CTAs of a cluster, by way of memory, over warps.
        sums: rate at which a CTA hands its sums to the others.
        crowded: of a launch whose successor finds no room for its CTAs beside it.
    """

    memory: float = 4.3e6
    sm: float = 70e3
    l2: float = 8e6
    latency: float = 1.2
    begin: float = 2.0
    tile: float = 0.3
    split: float = 0.12
    workspace: float = 1.0
    sums: float = 40e3
    warps_k: float = 0.1
    crowded: float = 0.5


CONSTANTS = Constants()


class Load(NamedTuple):
    """What a config asks of a GPU: bytes, and counts of CTAs.

    Args:
        weight: bytes of the weight that a CTA reads.
        x: bytes of x that a CTA reads.
        tiles: CTAs, or tiles of persistent ones.
        busiest: those of the SM that has most.
        resident: CTAs that run on an SM at once.
        in_flight: bytes of the weight that an SM has asked for, at most.
        alone: the next launch finds no room for a CTA beside those of this one.
    """

    weight: int
    x: int
    tiles: int
    busiest: int
    resident: int
    in_flight: float
    alone: bool


def load_of(
    problem: GemmProblem, config: TileConfig, sm_count: int, limit: int = SHARED_BYTES
) -> Load:
    """What ``config`` asks of a GPU with so many SMs, whose CTAs have ``limit`` bytes."""
    rows, n, k, _, _, scale_columns = problem
    stage_k = stage_columns(scale_columns)
    shared = config.shared_bytes(k, rows, scale_columns) + 1024
    warps = 4 if config.tma else config.warps_n * config.warps_k
    tiles = config.ctas(n)
    fitting = max(1, min(limit // shared, 64 // warps))
    if config.persistent:
        fitting = min(fitting, 2)
    resident = min(fitting, -(-tiles // sm_count))
    share = -(-(k // stage_k) // config.split_k)  # stages of a CTA
    ring = 2048 * config.row_tiles * config.warps_n * config.warps_k
    deep = min(config.stages, -(-share // config.warps_k))
    slots = sm_count * resident
    busiest = -(-tiles // slots) * resident if config.persistent else -(-tiles // sm_count)
    return Load(
        weight=128 * share * config.weight_rows,
        x=128 * share * row_groups(rows) * 8 * (2 if scale_columns else 1),
        tiles=tiles,
        busiest=busiest,
        resident=resident,
        in_flight=float(resident * ring * deep),
        alone=resident * shared + shared > limit,
    )


def estimated_us(
    problem: GemmProblem,
    config: TileConfig,
    sm_count: int,
    limit: int = SHARED_BYTES,
    constants: Constants = CONSTANTS,
) -> float:
    """About how long a launch of ``config`` takes among others of its kind, in microseconds."""
    c, load = constants, load_of(problem, config, sm_count, limit)
    share = sm_count / 132
    both = 1 + load.x / load.weight  # x comes with the weight, in buffers of its own
    rate = load.in_flight / (c.latency + load.in_flight * both / c.sm)
    bytes_of_all = load.tiles * (load.weight + load.x)
    moved = max(
        load.tiles * load.weight / (c.memory * share),
        bytes_of_all / (c.l2 * share),
        load.busiest * load.weight / rate,
    )
    rounds = -(-load.busiest // load.resident) - 1
    extra = c.begin + c.tile * rounds + c.warps_k * math.log2(config.warps_k)
    if config.workspace:
        extra += c.workspace
    elif config.split_k > 1:
        extra += c.split * config.split_k
    if config.split_k > 1:
        extra += 32 * row_groups(problem.rows) * config.weight_rows / c.sums
    return moved + extra + c.crowded * load.alone


def ranked(
    problem: GemmProblem, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """Configs that can be built, by their estimated time; of one shape of tiles that with the
    number of stages whose estimate is least."""
    shapes: Iterable[TileConfig] = _mma_shapes(problem, sm_count)
    if tma:
        shapes = itertools.chain(_tma_shapes(problem, sm_count), shapes)
    costs: dict[TileConfig, float] = {}
    for shape in shapes:
        by_stages = {
            config: estimated_us(problem, config, sm_count, limit)
            for config in _deepened(problem, shape, limit)
        }
        if by_stages:
            best = min(by_stages, key=by_stages.__getitem__)
            costs[best] = by_stages[best]
    return sorted(costs, key=costs.__getitem__)


def short_ranking(
    problem: GemmProblem, count: int, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """The first ``count`` of :func:`ranked` that are not much alike: at most two divide the weight
    in the same way, and half of them at least are of the kernel that came second, if there are."""
    taken: dict[tuple[int, int, bool], int] = {}
    chosen: list[TileConfig] = []
    for config in ranked(problem, tma=tma, sm_count=sm_count, limit=limit):
        alike = config.weight_rows, config.split_k, config.tma
        if taken.get(alike, 0) < 2:
            taken[alike] = taken.get(alike, 0) + 1
            chosen.append(config)
    first = [config for config in chosen if config.tma == chosen[0].tma]
    second = [config for config in chosen if config.tma != chosen[0].tma]
    few = min(count // 3, len(second))
    return [*first[: count - few], *second[:few]]


def _is_filling(ctas: int, sm_count: int) -> bool:
    return sm_count * 6 // 11 <= ctas <= 4 * sm_count


def _tma_shapes(problem: GemmProblem, sm_count: int) -> Iterator[TileConfig]:
    for tiles, split_k in itertools.product(range(1, 17), _SPLITS):
        shape = TileConfig(tiles, 1, 1, split_k, 2, stream_x=True, tma=True)
        yield from _variants(shape, problem, sm_count)


def _mma_shapes(problem: GemmProblem, sm_count: int) -> Iterator[TileConfig]:
    for row_tiles, (warps_n, warps_k), split_k in itertools.product((1, 2, 3, 4), _WARPS, _SPLITS):
        shape = TileConfig(row_tiles, warps_n, warps_k, split_k, 2)
        for each in _variants(shape, problem, sm_count):
            yield each
            if warps_k == 1:
                yield each._replace(stream_x=True)


def _variants(shape: TileConfig, problem: GemmProblem, sm_count: int) -> Iterator[TileConfig]:
    """A shape of tiles as it is, with a workspace, and with CTAs that stay, where it fills the
    GPU and covers the weight."""
    n, ctas = problem.n, shape.ctas(problem.n)
    if problem.epilogue in (ADD, SILU_GATE) and n % shape.weight_rows:
        return
    if _is_filling(ctas, sm_count):
        yield shape
        if shape.split_k > 1 and shape.warps_k == 1:
            yield shape._replace(workspace=True)
    elif ctas > 4 * sm_count and shape.split_k * shape.warps_k == 1 and problem.epilogue != ADD:
        yield shape._replace(persistent=True)


def _deepened(problem: GemmProblem, shape: TileConfig, limit: int) -> Iterator[TileConfig]:
    """The config with most stages of which one, two, three or four CTAs share an SM."""
    k, rows, scale_columns = problem.k, problem.rows, problem.scale_columns
    units = k // stage_columns(scale_columns) // (shape.split_k * shape.warps_k)
    least = shape.shared_bytes(k, rows, scale_columns)
    step = shape._replace(stages=4).shared_bytes(k, rows, scale_columns) - least
    seen = set()
    for resident in (1, 2, 3, 4):
        room = limit // resident - 1024 - least
        stages = 2 + max(0, room) * 2 // step
        stages = min(_MOST_STAGES, max(2, units), stages)
        while stages > 2 and shape._replace(stages=stages).shared_bytes(
            k, rows, scale_columns
        ) > min(limit, limit // resident - (1024 if resident > 1 else 0)):
            stages -= 1
        config = shape._replace(stages=stages)
        if room >= 0 and stages not in seen and config.can_serve(problem, limit):
            seen.add(stages)
            yield config
