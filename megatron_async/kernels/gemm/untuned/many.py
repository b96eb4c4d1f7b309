"""Tile configs of ``skinny_gemm_many.cu`` that nobody measured, ranked by an estimate of its time.

A stage takes the longest of three: the weight's bytes through memory, shared by all CTAs; all bytes
of the stage into one SM; and the products. To the stages comes what each launch has once. The
constants were fitted to times on one H200.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    NO_NORM,
    GemmProblem,
    TileConfig,
    row_groups,
    stage_count,
)

MEMORY, SM = 4.3e6, 83e3
"""Bytes a microsecond, of memory and into an SM."""
READING = 0.93
"""SMs that it takes to read at the memory's rate, as a share of all."""
L2 = 100e6
"""Bytes a microsecond of x from the L2 cache. They cost power rather than time: a step of 128 rows
of Llama-8B runs into the limit of an H200."""
PRODUCTS = 0.0182
"""Microseconds of a stage, for 64 rows of x and 16 of the weight."""
BEGIN, NORM = 1.8, 0.5
"""Microseconds of a launch, and of its norm."""
END = 1.6
"""Microseconds of the end of a tile."""
IN_CLUSTER, CLUSTER_SUMS = 0.5, 14e3
"""Split K in a cluster: microseconds, and bytes a microsecond of a CTA's sums."""
WORKSPACE, WORKSPACE_SUMS = 3.0, 6.4e3
"""Split K by a workspace: the same."""
REACHED = {3: 114, 4: 112, 5: 105, 6: 108, 7: 105, 8: 104}
"""SMs among 132, by the CTAs of a cluster of more than two."""
LEAST_BUSY = 0.6
"""CTAs at least, as a share of the SMs, where a weight has enough tiles."""


def configs(problem: GemmProblem, sm_count: int, limit: int) -> Iterator[TileConfig]:
    """Configs of one wave of CTAs, or of CTAs that persist, with as many stages as have room."""
    if problem.scale_columns:
        return
    for row_tiles, split_k, multicast, workspace in itertools.product(
        range(1, 17), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2), (False, True)
    ):
        shape = TileConfig(
            row_tiles, 1, 1, split_k, 2, stream_x=True, workspace=workspace, tma=True,
            multicast=multicast,
        )  # fmt: skip
        ctas = shape.ctas(problem.n)
        cluster = multicast if workspace else multicast * split_k
        persistent = ctas > cluster_sms(sm_count, cluster)
        if persistent and (split_k > 1 or problem.epilogue == ADD):
            continue
        for stages in range(min(12, stage_count(problem.k, 0) // split_k), 1, -1):
            config = shape._replace(stages=stages, persistent=persistent)
            if config.can_serve(problem, limit):
                yield config
                break


def cluster_sms(sm_count: int, size: int) -> int:
    """SMs that clusters of ``size`` CTAs reach at once."""
    return sm_count * REACHED.get(size, 132) // 132


def estimated_us(problem: GemmProblem, config: TileConfig, sm_count: int) -> float:
    """About how long a launch of ``config`` takes among others of its kind, in microseconds."""
    ctas = config.ctas(problem.n)
    running = min(ctas, sm_count)
    waves = -(-ctas // running)
    weight = 128 * config.weight_rows
    groups = row_groups(config.kernel_rows(problem.rows))
    x = 1024 * groups
    stage = max(
        weight * running / MEMORY / min(1.0, running / (READING * sm_count)),
        (weight + x) / SM,
        PRODUCTS * config.row_tiles * groups / 8,
    )
    stages = stage_count(problem.k, 0) / config.split_k
    us = BEGIN + waves * (END + stage * stages) + ctas * stages * x / config.multicast / L2
    us += 0.0 if problem.norm == NO_NORM else NORM
    if config.split_k > 1:
        once, rate = (WORKSPACE, WORKSPACE_SUMS) if config.workspace else (IN_CLUSTER, CLUSTER_SUMS)
        us += once + 32 * groups * config.weight_rows / rate
    return us


def ranked(problem: GemmProblem, sm_count: int, limit: int) -> list[TileConfig]:
    """Configs that can be built, by their estimated time."""
    costs = {
        config: estimated_us(problem, config, sm_count)
        for config in configs(problem, sm_count, limit)
    }
    busy = [each for each in costs if each.ctas(problem.n) >= LEAST_BUSY * sm_count]
    return sorted(busy or costs, key=costs.__getitem__)
