"""How products of shapes that nobody measured are cut up: what measuring favoured for others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from megatron_async.kernels.gemm.tilings import (
    ADD,
    MULTIPROCESSORS,
    SHARED_BYTES,
    UNIT,
    Tiling,
)

LEAST_STAGES = 3
"""With fewer a product waits for each, which costs more than blocks that wait for others."""

_WARPS_N = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_WARPS_K = (1, 2, 4, 8, 16)
_STAGES = (2, 3, 4, 5, 6, 8)


def candidates(
    n: int, k: int, rows: int, norm: int, epilogue: int, *, waves: bool = False
) -> Iterator[Tiling]:
    """Tilings that are not hopeless: enough warps, and enough blocks but not many waves of them.

    ``waves``: many waves, in place of blocks that go on to further rows and cannot split K.
    """
    for row_tiles, warps_n, warps_k, splits in itertools.product(
        (1, 2, 3, 4), _WARPS_N, _WARPS_K, (1, 2, 4, 8)
    ):
        cut = Tiling(row_tiles, warps_n, warps_k, splits, stages=2)
        blocks = cut.blocks(n)
        persistent = blocks > 4 * MULTIPROCESSORS and not waves
        if not 2 <= warps_n * warps_k <= 16:
            continue
        if blocks < 84 and row_tiles * warps_n > 1:
            continue
        if blocks > 2 * MULTIPROCESSORS + 24 and not persistent and not waves:
            continue
        memories = (False,) if waves else (False, True)
        for stages, stream, memory in itertools.product(_STAGES, (False, True), memories):
            tiling = cut._replace(
                stages=stages, stream=stream, persistent=persistent, memory=memory
            )
            if tiling.fits(n, k, rows, norm, epilogue):
                yield tiling


def estimate(
    n: int, k: int, rows: int, norm: int, epilogue: int, boxes: bool = True
) -> Tiling | None:
    """The tiling for a product ``[rows, k] x [n, k]``; None if no tiling fits.

    Args:
        rows: padded, of up to 32.
        boxes: whether it may take boxes.
    """
    if boxes and _is_for_boxes(n, k, rows, epilogue):
        even = even_tilings(box_cuts(n), n, k, rows, norm, epilogue)
        if even:
            return even[0]
    for waves in (False, True):
        best: tuple[float, Tiling] | None = None
        for tiling in candidates(n, k, rows, norm, epilogue, waves=waves):
            cost = _cost(tiling, n, k, rows)
            if best is None or cost < best[0]:
                best = cost, tiling
        if best is not None:
            return best[1]
    return None


def _is_for_boxes(n: int, k: int, rows: int, epilogue: int) -> bool:
    """Where the most even cut into boxes came nearer to the best than what :func:`_cost` says, for
    the shapes that were measured."""
    wide = epilogue != ADD and n >= 8192 and n * k >= 20e6
    deep = epilogue == ADD and k > n
    return wide or (rows > 16 and not deep)


def box_cuts(n: int) -> Iterator[Tiling]:
    """Cuts into boxes, of two stages, where there are enough blocks but not many waves of them."""
    for tiles, splits, memory in itertools.product(range(1, 17), (1, 2, 4, 8), (False, True)):
        cut = Tiling(tiles, 1, 1, splits, 2, stream=True, memory=memory, box=True)
        blocks = cut.blocks(n)
        persistent = blocks > 4 * MULTIPROCESSORS
        if 96 <= blocks <= 2 * MULTIPROCESSORS + 24 or persistent:
            yield cut._replace(persistent=persistent)


def lane_cuts(n: int) -> Iterator[Tiling]:
    """Cuts by lanes, of two stages: blocks of 4 to 16 warps."""
    for row_tiles, warps_n, warps_k, splits, stream, memory in itertools.product(
        (1, 2, 3, 4, 5, 6), _WARPS_N, _WARPS_K, (1, 2, 3, 4, 6, 8), (False, True), (False, True)
    ):
        if 4 <= warps_n * warps_k <= 16:
            cut = Tiling(row_tiles, warps_n, warps_k, splits, 2, stream, memory=memory)
            yield cut._replace(persistent=cut.blocks(n) > 4 * MULTIPROCESSORS)


def even_tilings(
    cuts: Iterable[Tiling], n: int, k: int, rows: int, norm: int, epilogue: int
) -> list[Tiling]:
    """Cuts whose blocks give every multiprocessor about as much to read, with enough of it on its
    way; the best first.

    They have as many stages as let all blocks run at once or go on to further rows, or
    :data:`LEAST_STAGES`, if these fit, where that would leave fewer.
    """
    scores: dict[Tiling, float] = {}
    for cut in cuts:
        blocks = cut.blocks(n)
        together = 2 if cut.persistent else -(-blocks // MULTIPROCESSORS)
        units = k / UNIT / (cut.splits * cut.warps_k)
        if together > 4 or units < 1:
            continue
        room = SHARED_BYTES // together - 1024
        for stages in range(min(14, math.ceil(units)), 1, -1):
            tiling = cut._replace(stages=stages)
            if tiling.fits(n, k, rows, norm, epilogue) and (
                tiling.shared_bytes(k, rows) <= room or stages == LEAST_STAGES
            ):
                break
        else:
            continue
        slots = MULTIPROCESSORS * (together if cut.persistent else 1)
        share = blocks / slots / math.ceil(blocks / slots) * units / math.ceil(units)
        flight = together * cut.warps_n * cut.warps_k * stages * 2048 * cut.row_tiles
        score = share * min(1.0, flight / 65536) - 0.01 * cut.splits
        # Blocks that go on end often if they are small.
        scores[tiling] = score - 16 / cut.weight_rows if cut.persistent else score
    return sorted(scores, key=scores.__getitem__, reverse=True)


def _cost(tiling: Tiling, n: int, k: int, rows: int) -> float:
    """What measuring favoured: blocks on all multiprocessors in one wave, two of them beside each
    other so that the next product's weights are on their way while this one ends, many warps in K
    while x is small, no large clusters."""
    blocks = tiling.blocks(n)
    shared = tiling.shared_bytes(k, rows)
    together = 2 if shared <= SHARED_BYTES // 2 else 1
    if tiling.persistent:
        waves = 1.0
    else:
        # Clusters of more than two do not fill the last multiprocessors of each of the GPU's parts.
        fills = tiling.memory or tiling.splits <= 2
        slots = (MULTIPROCESSORS if fills else 112) * together
        waves = -(-blocks // slots) * together * MULTIPROCESSORS / max(blocks, MULTIPROCESSORS)
        waves = max(waves, MULTIPROCESSORS / blocks)
        if together == 2:
            waves = max(MULTIPROCESSORS / blocks, 1.0) * -(-blocks // slots)
    traffic = 1 + 0.3 * rows / tiling.weight_rows
    warps = tiling.warps_n * tiling.warps_k
    flight = warps * tiling.stages * 2048 * tiling.row_tiles * min(together, blocks / 132)
    latency = 1 + 0.5 * max(0.0, 1 - flight / (96 * 1024))
    parallel = 1 + 0.1 * max(0.0, 1 - tiling.warps_k / 8) * (rows <= 8 and not tiling.persistent)
    return waves * traffic * latency * parallel * (1 + 0.03 * (tiling.splits - 1))
