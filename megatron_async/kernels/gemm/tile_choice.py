"""Which tile config a skinny GEMM takes: the measured one, else a heuristic.

The heuristic is what measuring favoured for other shapes. Its constants were found on an H200 (132
SMs) and scale with the number of SMs.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    HEURISTIC,
    MAX_ROWS,
    SHARED_BYTES,
    Entry,
    GemmProblem,
    TileConfig,
    is_of_many_rows,
    lookup,
    measured,
    stage_columns,
)
from megatron_async.kernels.gemm.untuned.ranking import (
    LARGE_WEIGHTS,
    ranked,
    widens_for_wgmma,
)

FALLBACK_ROWS = {
    1: (1, 32), 2: (1, 8, 32), 4: (4, 8, 1, 32), 8: (8, 1, 32), 16: (16, 32, 1), 32: (32, 1),
    48: (48, 64), 64: (64,), 128: (128,),
}  # fmt: skip
"""Whose measurements a number of rows goes by, in order."""


def find(
    problem: GemmProblem, tma: bool = True, *, sm_count: int, limit: int = SHARED_BYTES
) -> Entry | None:
    """The entry for a problem on a GPU that nobody tuned for it, whose CTAs have ``limit`` bytes of
    shared memory; None if no kernel can be built.

    The measured one of this shape at these rows, or at rows near by, that can be built and needs no
    TMA where there is none; for e4m3 weights with a scale for some columns, also one for weights
    with a scale for each row. Else the heuristic's. More than :data:`MAX_ROWS` have none.
    """
    rows, n, k, norm, epilogue, scale_columns, e4m3_inputs = problem
    assert norm is not None and epilogue is not None
    if rows > MAX_ROWS:
        return None
    table = measured()
    alike = [scale_columns] if scale_columns in (0, k) else [scale_columns, k]
    for columns, like in itertools.product(alike, FALLBACK_ROWS.get(rows, ())):
        entry = lookup(table, problem._replace(rows=like, scale_columns=columns))
        if entry is None or entry.config.tma > tma:
            continue
        if entry.config.can_serve(problem, limit):
            return entry
    many = is_of_many_rows(rows, scale_columns)
    widens = tma and widens_for_wgmma(problem)
    if e4m3_inputs or many or widens or (not scale_columns and n * k >= LARGE_WEIGHTS):
        found = ranked(problem, tma=tma, sm_count=sm_count, limit=limit)
        if found or e4m3_inputs or many:
            return Entry(problem, found[0], HEURISTIC) if found else None
    config = heuristic_config(
        n, k, rows, norm, epilogue, tma, sm_count=sm_count, limit=limit, scale_columns=scale_columns
    )
    return None if config is None else Entry(problem, config, HEURISTIC)


@functools.cache
def choose(
    n: int,
    k: int,
    rows: int,
    norm: int,
    epilogue: int,
    tma: bool = True,
    *,
    sm_count: int,
    limit: int = SHARED_BYTES,
    scale_columns: int = 0,
    e4m3_inputs: bool = False,
) -> TileConfig | None:
    """The config of :func:`find`."""
    problem = GemmProblem(rows, n, k, norm, epilogue, scale_columns, e4m3_inputs)
    entry = find(problem, tma, sm_count=sm_count, limit=limit)
    return None if entry is None else entry.config


MIN_STAGES = 3
"""With fewer a GEMM waits for each, which costs more than CTAs that wait for others."""

_WARPS_N = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_WARPS_K = (1, 2, 4, 8, 16)
_STAGES = (2, 3, 4, 5, 6, 8)


def max_ctas(sm_count: int) -> int:
    """CTAs in one launch at most, unless they are persistent: two waves, and a few that start
    late."""
    return 2 * sm_count + sm_count * 2 // 11


def cluster_sms(sm_count: int) -> int:
    """SMs that clusters of more than two CTAs reach: they do not fill the last SMs of each GPC."""
    return sm_count * 28 // 33


def candidates(
    n: int,
    k: int,
    rows: int,
    norm: int,
    epilogue: int,
    *,
    sm_count: int,
    waves: bool = False,
    limit: int = SHARED_BYTES,
    scale_columns: int = 0,
) -> Iterator[TileConfig]:
    """mma configs that are not hopeless: enough warps, and enough CTAs but not many waves of them.

    ``waves``: many waves, in place of persistent CTAs, which cannot split K.
    """
    # Where nothing is there to share, two warps are next to each other in N.
    smallest = 2 if scale_columns and k == stage_columns(scale_columns) else 1
    for row_tiles, warps_n, warps_k, split_k in itertools.product(
        (1, 2, 3, 4), _WARPS_N, _WARPS_K, (1, 2, 4, 8)
    ):
        if not 2 <= warps_n * warps_k <= 16:
            continue
        shape = TileConfig(row_tiles, warps_n, warps_k, split_k, stages=2)
        ctas = shape.ctas(n)
        persistent = ctas > 4 * sm_count and not waves
        if ctas < sm_count * 7 // 11 and row_tiles * warps_n > smallest:
            continue
        if ctas > max_ctas(sm_count) and not persistent and not waves:
            continue
        shape = shape._replace(persistent=persistent)
        if not shape.fits(n, k, rows, norm, epilogue, sys.maxsize, scale_columns):
            continue  # with any number of stages
        # None of the others fits.
        streams = (False, True) if warps_k == 1 else (False,)
        workspaces = (False, True) if warps_k == 1 < split_k and not waves else (False,)
        for stages, stream_x, workspace in itertools.product(_STAGES, streams, workspaces):
            config = TileConfig(*shape[:4], stages, stream_x, persistent, workspace)
            if config.fits(n, k, rows, norm, epilogue, limit, scale_columns):
                yield config


def heuristic_config(
    n: int,
    k: int,
    rows: int,
    norm: int,
    epilogue: int,
    tma: bool = True,
    *,
    sm_count: int,
    limit: int = SHARED_BYTES,
    scale_columns: int = 0,
) -> TileConfig | None:
    """The config for a GEMM ``[rows, k] x [n, k]^T``; None if none can be built.

    Args:
        rows: padded, of up to 32; with e4m3 weights of up to 64.
        tma: whether the wgmma kernel may be taken.
        limit: bytes of shared memory that a CTA may have.
    """
    if tma and not scale_columns and _favours_tma(n, k, rows, epilogue):
        shapes = tma_tile_shapes(n, sm_count)
        balanced = balanced_configs(
            shapes, n, k, rows, norm, epilogue, sm_count=sm_count, limit=limit
        )
        if balanced:
            return balanced[0]
    for waves in (False, True):
        best: tuple[float, TileConfig] | None = None
        for config in candidates(
            n, k, rows, norm, epilogue, sm_count=sm_count, waves=waves, limit=limit,
            scale_columns=scale_columns,
        ):  # fmt: skip
            resident = 2 if config.shared_bytes(k, rows, scale_columns) <= limit // 2 else 1
            cost = _cost(config, n, rows, sm_count, resident)
            if best is None or cost < best[0]:
                best = cost, config
        if best is not None:
            return best[1]
    return None


def _favours_tma(n: int, k: int, rows: int, epilogue: int) -> bool:
    """Where the most balanced TMA config came nearer to the best than what :func:`_cost` says, for
    the shapes that were measured."""
    wide = epilogue != ADD and n >= 8192 and n * k >= 20e6
    deep = epilogue == ADD and k > n
    return wide or (rows > 16 and not deep)


def tma_tile_shapes(n: int, sm_count: int) -> Iterator[TileConfig]:
    """wgmma configs of two stages, where there are enough CTAs but not many waves of them."""
    for tiles, split_k, workspace in itertools.product(range(1, 17), (1, 2, 4, 8), (False, True)):
        shape = TileConfig(tiles, 1, 1, split_k, 2, stream_x=True, workspace=workspace, tma=True)
        ctas = shape.ctas(n)
        persistent = ctas > 4 * sm_count
        if sm_count * 8 // 11 <= ctas <= max_ctas(sm_count) or persistent:
            yield shape._replace(persistent=persistent)


def mma_tile_shapes(n: int, sm_count: int) -> Iterator[TileConfig]:
    """mma configs of two stages: CTAs of 4 to 16 warps."""
    for row_tiles, warps_n, warps_k, split_k, stream_x, workspace in itertools.product(
        (1, 2, 3, 4, 5, 6), _WARPS_N, _WARPS_K, (1, 2, 3, 4, 6, 8), (False, True), (False, True)
    ):
        if 4 <= warps_n * warps_k <= 16:
            shape = TileConfig(
                row_tiles, warps_n, warps_k, split_k, 2, stream_x, workspace=workspace
            )
            yield shape._replace(persistent=shape.ctas(n) > 4 * sm_count)


def balanced_configs(
    shapes: Iterable[TileConfig],
    n: int,
    k: int,
    rows: int,
    norm: int,
    epilogue: int,
    *,
    sm_count: int,
    limit: int = SHARED_BYTES,
    scale_columns: int = 0,
) -> list[TileConfig]:
    """Configs that give every SM about as much to read, with enough of it in flight; best first.

    Of each of the ``shapes`` the one with as many stages as let all CTAs run at once, or persist;
    or with :data:`MIN_STAGES`, if these fit, where that would leave fewer.
    """
    scores: dict[TileConfig, float] = {}
    for shape in shapes:
        ctas = shape.ctas(n)
        resident = 2 if shape.persistent else -(-ctas // sm_count)  # CTAs of an SM
        units = k / stage_columns(scale_columns) / (shape.split_k * shape.warps_k)
        if resident > 4 or units < 1:
            continue
        share = limit // resident - 1024
        for stages in range(min(14, math.ceil(units)), 1, -1):
            config = shape._replace(stages=stages)
            if config.fits(n, k, rows, norm, epilogue, limit, scale_columns) and (
                config.shared_bytes(k, rows, scale_columns) <= share or stages == MIN_STAGES
            ):
                break
        else:
            continue
        slots = sm_count * (resident if shape.persistent else 1)
        balance = ctas / slots / math.ceil(ctas / slots) * units / math.ceil(units)
        in_flight = resident * shape.warps_n * shape.warps_k * stages * 2048 * shape.row_tiles
        score = balance * min(1.0, in_flight / 65536) - 0.01 * shape.split_k
        # Persistent CTAs with small tiles come to an end of a tile often.
        scores[config] = score - 16 / shape.weight_rows if shape.persistent else score
    return sorted(scores, key=scores.__getitem__, reverse=True)


def _cost(config: TileConfig, n: int, rows: int, sm_count: int, resident: int) -> float:
    """What measuring favoured: CTAs on all SMs in one wave, two on each SM so that the next GEMM's
    weights are in flight while this one ends, many warps in K while x is small, no large
    clusters."""
    ctas = config.ctas(n)
    if config.persistent:
        waves = 1.0
    else:
        fills = config.workspace or config.split_k <= 2
        slots = (sm_count if fills else cluster_sms(sm_count)) * resident
        waves = -(-ctas // slots) * resident * sm_count / max(ctas, sm_count)
        waves = max(waves, sm_count / ctas)
        if resident == 2:
            waves = max(sm_count / ctas, 1.0) * -(-ctas // slots)
    traffic = 1 + 0.3 * rows / config.weight_rows
    warps = config.warps_n * config.warps_k
    in_flight = warps * config.stages * 2048 * config.row_tiles * min(resident, ctas / sm_count)
    latency = 1 + 0.5 * max(0.0, 1 - in_flight / (96 * 1024))
    parallel = 1 + 0.1 * max(0.0, 1 - config.warps_k / 8) * (rows <= 8 and not config.persistent)
    return waves * traffic * latency * parallel * (1 + 0.03 * (config.split_k - 1))
