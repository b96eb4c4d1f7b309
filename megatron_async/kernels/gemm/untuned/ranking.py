"""Tile configs of a skinny GEMM that nobody measured, ranked by an estimate of its time.

The estimate follows what a GEMM of few rows waits for: all bytes of the weight through memory, and
those of the SM that has most of them; shared memory, which warps read again and again; and the loop
of a CTA, stage by stage. To these it adds what comes once: the begin, statistics of the norm, sums
of split K. The constants were fitted to 2,294 times on one H200 (``scripts/bench_untuned.py``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_async.kernels.gemm.skinny_gemm import ALONE_BYTES, alone_ctas
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    NO_NORM,
    SHARED_BYTES,
    SILU_GATE,
    GemmProblem,
    TileConfig,
    is_of_many_rows,
    row_groups,
    stage_columns,
    stage_count,
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
_REGISTERS = 65536
_REACHED = {3: 114, 4: 120, 6: 114, 8: 112}
"""SMs among 132, by the CTAs of a cluster; an H200 was seen to reach 117, 120, 114 and 120."""


class Loop(NamedTuple):
    """The main loop of a kernel; times in microseconds, rates in bytes a microsecond.

    Args:
        sm: rate at which an SM takes weights and x at most.
        latency: until bytes that were asked for are there.
        shared: rate at which an SM's warps read its shared memory.
        lost: stages of a ring that nothing comes into, since they are being read.
        begin: of a launch.
        wave: of each wave of CTAs behind the first.
        stage, groups, tiles: of a stage in a CTA; for each eight rows of x; for these and each tile
            of a warp.
        norm, statistics: of a norm; for each 20,480 statistics that a warp loads.
    """

    sm: float
    latency: float
    shared: float
    lost: float
    begin: float
    wave: float
    stage: float
    groups: float
    tiles: float
    norm: float
    statistics: float


MMA = Loop(80.7e3, 0.43, 274e3, 0.25, 1.35, 0.234, 0.1375, 0.0467, 0.0104, 0.40, 0.813)
WGMMA = Loop(86.9e3, 0.22, 193e3, 1.48, 1.97, 0.100, 0.1731, 0.0035, 0.0065, 0.32, 0.911)
MEMORY = 4.45e6 / 132
"""Bytes a microsecond from memory, for each SM."""
MMA_WARPS = 0.0066 / 4
"""Microseconds of a stage, for each warp of an SM, eight rows of x and tile of a warp."""
TOGETHER = 3.3
"""Limits add up to somewhat more than the highest of them: the exponent of their norm."""
CLUSTER, CLUSTER_SUMS = 0.065, 133e3
"""Split K in a cluster: microseconds for each CTA, bytes a microsecond of the sums."""
WORKSPACE, WORKSPACE_SUMS = 1.53, 29e3
"""Split K by a workspace: microseconds in all, bytes a microsecond of the sums."""
WIDENED, WIDENED_GROUPS = 0.3, 0.02
"""Microseconds of a stage in which the wgmma kernel widens e4m3, for each 64 rows of the weight and
CTA of an SM, and for those and each eight rows of x. They were fitted to the order of 519 configs
of Llama-8B's GEMMs at 32 and 64 rows (``tune --exhaustive``), not to their times, which are up to
half as long as estimated."""
LARGE_WEIGHTS = 6_000_000
"""Elements of a weight from which on the estimate is used for it: smaller ones were not timed. With
inputs in e4m3 it is used for all: the kernel is that of bfloat16, over as many bytes."""
WIDENING_ROWS = 32
"""See :func:`widens_for_wgmma`."""
WARPS_K, STORED = 0.064, 33e3
"""Microseconds for each doubling of the warps in K, bytes a microsecond of what CTAs put out."""
AHEAD, AHEAD_BYTES = 0.97, 2.34e6
"""Microseconds that weights spare which come before the launch in front ends, and how many it takes
for most of that."""
BALANCE = 0.7
"""Mean CTAs of an SM, as a share of the most that one has: with fewer none was among the best."""
LARGE, SHARED_SM = 25.0, 0.96
"""Microseconds from which on :func:`ranked_in_order` takes CTAs that share an SM to be quicker than
estimated, as they were, and the share of the estimate."""
UNEVEN = 0.79
"""CTAs more than the mean on some SM, where there is room for one more on each."""


class Load(NamedTuple):
    """What a config asks of a GPU: bytes, and counts of CTAs.

    Args:
        weight, x: bytes that a CTA reads of the weight, and of x.
        tiles: CTAs, or tiles of persistent ones.
        fitting: CTAs that an SM has room for.
        resident: CTAs that run on an SM at once.
        busiest: those of the SM that has most, over all waves.
        waves: of CTAs, or tiles of persistent ones, behind each other.
        ring: bytes of the weight that a CTA asks for ahead.
        stage: bytes of a stage of the ring.
    """

    weight: int
    x: int
    tiles: int
    fitting: int
    resident: int
    busiest: float
    waves: int
    ring: int
    stage: int


def load_of(
    problem: GemmProblem, config: TileConfig, sm_count: int, limit: int = SHARED_BYTES
) -> Load:
    """What ``config`` asks of a GPU with ``sm_count`` SMs, whose CTAs have ``limit`` bytes."""
    rows, n, k, _, _, scale_columns, e4m3_inputs = problem
    tiles, threads = config.ctas(n), 32 * _warps(config)
    shared = config.shared_bytes(k, rows, scale_columns, e4m3_inputs)
    if alone_ctas(sm_count) <= tiles <= sm_count:
        shared = max(shared, ALONE_BYTES)
    most = min(limit // (shared + 1024), 2048 // threads)
    of_thread = registers(config, rows, widens=bool(scale_columns) and not e4m3_inputs)
    fitting = max(1, min(most, _REGISTERS // (threads * of_thread)))
    sms = cluster_sms(sm_count, 1 if config.workspace else config.split_k)
    if config.persistent:
        fitting = min(fitting, 2)
        resident = min(fitting, -(-tiles // sms))
        waves = -(-tiles // (sms * resident))
        busiest = waves * resident
    else:
        waves = -(-tiles // (sms * fitting))
        resident = fitting if waves > 1 else -(-tiles // sms)
        busiest = (waves - 1) * fitting + -(-(tiles - (waves - 1) * fitting * sms) // sms)
    share = -(-stage_count(k, scale_columns) // config.split_k)  # stages of a CTA
    stage = 2048 * config.row_tiles * config.warps_n * config.warps_k
    return Load(
        weight=128 * share * config.weight_rows,
        x=128 * share * row_groups(rows) * 8 * (2 if scale_columns and not e4m3_inputs else 1),
        tiles=tiles,
        fitting=fitting,
        resident=resident,
        busiest=busiest,
        waves=waves,
        ring=stage * min(config.stages, -(-share // config.warps_k)),
        stage=stage,
    )


def registers(config: TileConfig, rows: int, *, widens: bool = False) -> int:
    """About how many a thread takes, for padded ``rows``; ``widens``: of weights in e4m3."""
    groups = row_groups(rows)
    if config.tma:
        return 60 + 40 * widens + 4 * groups * -(-config.row_tiles // 4)
    return min(255, 40 + 8 * groups + 4 * config.row_tiles * (4 + groups))


def estimated_us(
    problem: GemmProblem, config: TileConfig, sm_count: int, limit: int = SHARED_BYTES
) -> float:
    """About how long a launch of ``config`` takes among others of its kind, in microseconds."""
    load, loop = load_of(problem, config, sm_count, limit), WGMMA if config.tma else MMA
    limits = (
        load.tiles * load.weight / (MEMORY * sm_count),
        *_sm_us(config, load, loop),
        load.waves * _loop_us(problem, config, load, loop),
    )
    moved: float = sum(each**TOGETHER for each in limits) ** (1 / TOGETHER)
    free = min(load.tiles, max(0, load.fitting * sm_count - load.tiles)) * load.ring
    spared = AHEAD * (1 - math.exp(-free * 132 / sm_count / AHEAD_BYTES))
    once = loop.begin - spared + loop.wave * (load.waves - 1) + WARPS_K * math.log2(config.warps_k)
    norms = 1 if config.persistent else load.waves
    return (
        moved
        + once
        + norms * _norm_us(problem, config, loop)
        + load.waves * _sums_us(problem.rows, config)
    )


def cluster_sms(sm_count: int, size: int) -> int:
    """SMs that clusters of ``size`` CTAs reach: large ones do not fill the last SMs of each GPC."""
    return sm_count * _REACHED.get(size, 132) // 132


def _warps(config: TileConfig) -> int:
    return 4 if config.tma else config.warps_n * config.warps_k


def _sm_us(config: TileConfig, load: Load, loop: Loop) -> tuple[float, float]:
    """What the SM with most CTAs waits for: bytes from outside, and from its shared memory."""
    busiest = load.busiest
    if load.waves == 1 and not config.persistent:
        # CTAs that start while the kernel in front still runs do not spread evenly.
        busiest += UNEVEN * math.sqrt(min(2, load.fitting - load.resident))
    coming = load.resident * max(load.ring - loop.lost * load.stage, load.stage / 4)
    rate = coming / (loop.latency + coming * (1 + load.x / load.weight) / loop.sm)
    readers = -(-config.row_tiles // 4) if config.tma else config.warps_n
    read = load.weight + load.x * readers
    return busiest * load.weight / rate, busiest * read / loop.shared


def _loop_us(problem: GemmProblem, config: TileConfig, load: Load, loop: Loop) -> float:
    """The main loop of a CTA by itself."""
    groups = row_groups(problem.rows)
    tiles = groups * (-(-config.row_tiles // 4) if config.tma else config.row_tiles)
    stage = loop.stage + loop.groups * groups + loop.tiles * tiles
    if not config.tma:
        stage += MMA_WARPS * tiles * _warps(config) * load.resident
    elif problem.scale_columns and not problem.e4m3_inputs:
        stage += WIDENED * tiles / groups * load.resident + WIDENED_GROUPS * tiles
    stages = problem.k / stage_columns(problem.scale_columns) / config.split_k / config.warps_k
    return stages * stage


def _norm_us(problem: GemmProblem, config: TileConfig, loop: Loop) -> float:
    if problem.norm == NO_NORM:
        return 0.0
    of_warp = max(4, problem.rows) / _warps(config) * problem.k
    return loop.norm + loop.statistics * of_warp / 20480


def _sums_us(rows: int, config: TileConfig) -> float:
    """What happens to the sums of a CTA's tile."""
    size = 32 * row_groups(rows) * config.weight_rows
    us = size / STORED
    if config.workspace:
        us += WORKSPACE + config.split_k * size / WORKSPACE_SUMS
    elif config.split_k > 1:
        us += CLUSTER * config.split_k + size / CLUSTER_SUMS
    return us


def widens_for_wgmma(problem: GemmProblem) -> bool:
    """Whether large weights in e4m3 with a scale for each row, which the kernel has to widen, are
    left to the wgmma kernel: from :data:`WIDENING_ROWS` on it was the quicker one."""
    rows, n, k, _, _, scale_columns, e4m3_inputs = problem
    by_row = scale_columns == k and not e4m3_inputs
    return by_row and rows >= WIDENING_ROWS and n * k >= LARGE_WEIGHTS


@functools.lru_cache(maxsize=256)
def ranked(
    problem: GemmProblem, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> tuple[TileConfig, ...]:
    """Configs that can be built, by their estimated time."""
    if is_of_many_rows(problem.rows, problem.scale_columns):
        from megatron_async.kernels.gemm.untuned import many

        return tuple(many.ranked(problem, sm_count, limit) if tma else ())
    by_wgmma = _tma_shapes(problem, sm_count) if tma else ()
    by_mma = () if tma and widens_for_wgmma(problem) else _shapes(problem, sm_count)
    shapes = itertools.chain(by_wgmma, by_mma)
    costs = {
        config: estimated_us(problem, config, sm_count, limit)
        for shape in shapes
        for config in _built(problem, shape, sm_count, limit)
    }
    if not costs and problem.e4m3_inputs and tma:
        costs = {config: -config.ctas(problem.n) for config in _small(problem, limit)}
    return tuple(sorted(costs, key=costs.__getitem__))


def ranked_in_order(
    problem: GemmProblem, split_k: int, *, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """wgmma configs by their estimated time in which ``split_k`` CTAs of a cluster share K, with
    any number of tiles: small weights too, which fill no GPU."""
    costs: dict[TileConfig, float] = {}
    for row_tiles in range(1, 17):
        shape = TileConfig(row_tiles, 1, 1, split_k, 2, stream_x=True, tma=True)
        shape = shape._replace(persistent=shape.ctas(problem.n) > 4 * sm_count)
        for resident in range(1, 5):
            config = _deepest(problem, shape, resident, limit)
            if config is None or config in costs:
                continue
            us = estimated_us(problem, config, sm_count, limit)
            shares = us > LARGE and config.ctas(problem.n) > sm_count
            costs[config] = SHARED_SM * us if shares else us
    return sorted(costs, key=costs.__getitem__)


def short_ranking(
    problem: GemmProblem, count: int, *, tma: bool, sm_count: int, limit: int = SHARED_BYTES
) -> list[TileConfig]:
    """At most ``count`` of :func:`ranked` that are not much alike: at most two divide the weight in
    the same way, and a third are of the kernel that does not come first, if there are such."""
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


def _shapes(problem: GemmProblem, sm_count: int) -> Iterator[TileConfig]:
    """mma tiles that fill the GPU and cover the weight."""
    whole = problem.epilogue in (ADD, SILU_GATE)
    for row_tiles, (warps_n, warps_k), split_k in itertools.product((1, 2, 3), _WARPS, _SPLITS):
        height = 16 * row_tiles * warps_n
        tiles = -(-problem.n // height) * split_k
        if (whole and problem.n % height) or not _is_filling(tiles, split_k * warps_k, sm_count):
            continue
        shape = TileConfig(row_tiles, warps_n, warps_k, split_k, 2)
        if registers(shape, problem.rows) * 32 * warps_n * warps_k > _REGISTERS:
            continue  # they would spill
        shape = shape._replace(persistent=tiles > 4 * sm_count)
        yield from (shape, shape._replace(stream_x=True)) if warps_k == 1 else (shape,)


def _tma_shapes(problem: GemmProblem, sm_count: int) -> Iterator[TileConfig]:
    """wgmma tiles that fill the GPU and cover the weight."""
    whole = problem.epilogue in (ADD, SILU_GATE)
    for row_tiles, split_k in itertools.product(range(1, 17), _SPLITS):
        tiles = -(-problem.n // (16 * row_tiles)) * split_k
        if (whole and problem.n % (16 * row_tiles)) or not _is_filling(tiles, split_k, sm_count):
            continue
        shape = TileConfig(row_tiles, 1, 1, split_k, 2, stream_x=True, tma=True)
        yield shape._replace(persistent=tiles > 4 * sm_count)


def _small(problem: GemmProblem, limit: int) -> Iterator[TileConfig]:
    """wgmma configs of weights that do not fill the GPU."""
    for row_tiles, split_k in itertools.product((4, 2, 1), (1, 2, 4)):
        config = TileConfig(row_tiles, 1, 1, split_k, 2, stream_x=True, tma=True)
        if config.can_serve(problem, limit):
            yield config


def _is_filling(tiles: int, splits: int, sm_count: int) -> bool:
    if tiles > 4 * sm_count:
        return splits == 1  # they persist
    return tiles >= BALANCE * sm_count * -(-tiles // sm_count)


def _built(
    problem: GemmProblem, shape: TileConfig, sm_count: int, limit: int
) -> Iterator[TileConfig]:
    """The config with most stages of which as many CTAs share an SM as run at once, and of which
    fewer do; also with a workspace."""
    tiles = shape.ctas(problem.n)
    needed = 2 if shape.persistent else min(4, -(-tiles // sm_count))
    for each in (shape, shape._replace(workspace=True)):
        if each.workspace and not (8 < problem.rows <= 32 and shape.split_k > 1 == shape.warps_k):
            continue  # it was never the best for other rows
        seen = set()
        for resident in {needed, (needed + 1) // 2, 1 if shape.persistent else needed}:
            config = _deepest(problem, each, resident, limit)
            if config is not None and config not in seen:
                seen.add(config)
                yield config


def _deepest(
    problem: GemmProblem, shape: TileConfig, resident: int, limit: int
) -> TileConfig | None:
    """The config with most stages of which ``resident`` CTAs have room on an SM; None if there is
    none."""
    k, rows, scale_columns = problem.k, problem.rows, problem.scale_columns
    format_ = scale_columns, problem.e4m3_inputs
    room = limit if resident == 1 else limit // resident - 1024
    least = shape.shared_bytes(k, rows, *format_)
    if least > room:
        return None
    of_two = shape._replace(stages=4).shared_bytes(k, rows, *format_) - least
    units = stage_count(k, scale_columns) // (shape.split_k * shape.warps_k)
    stages = min(_MOST_STAGES, max(2, units), 3 + 2 * (room - least) // of_two)
    while shape._replace(stages=stages).shared_bytes(k, rows, *format_) > room:
        stages -= 1
    config = shape._replace(stages=stages)
    return config if config.can_serve(problem, limit) else None
