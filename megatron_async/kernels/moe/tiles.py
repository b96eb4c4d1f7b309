"""How the grouped GEMMs of a decode step's experts are divided into programs."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
"""Most rows of a step that the kernels take."""
_SHARED_BYTES = 110 * 1024
"""Shared memory of a program at most: two find room on an SM."""
_MOST_SPLITS = 16
_WEIGHT_BYTES = 48 * 1024
"""Weights that a program has on their way at least, if they fit."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one grouped GEMM.

    Args:
        block_n, block_k: rows and columns of the weight in a stage.
        stages: of the software pipeline; one of them is computed with.
        warps: of a program.
        splits: programs that share the inner dimension, of the second GEMM.
        swap: the weight is the first operand of the instruction, see ``experts_triton.py``.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    splits: int = 1
    swap: bool = False


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """Of the first and of the second grouped GEMM of a layer."""

    up: Tile
    down: Tile


def padded_rows(rows: int) -> int:
    """Rows of the tile that holds ``rows``: 16, 32 or 64."""
    return next(size for size in (16, 32, MAX_ROWS) if rows <= size)


def choose_tiles(hidden: int, inner: int, rows: int, sm_count: int) -> MoeTiles:
    """Tiles for weights of ``hidden`` by ``inner``, and padded ``rows``.

    A heuristic: about three programs an SM in the second GEMM, few rows of the weight for each, and
    as many stages as let two programs share an SM.
    """
    block_k = 128 if hidden % 128 == 0 else 64
    up = Tile(32, block_k, _stages(32, block_k, rows))
    choices = []
    for block_n in (size for size in (16, 32, 64) if hidden % size == 0):
        for block_k in (64, 128):
            most = -(-inner // block_k)
            for splits in range(1, min(most, _MOST_SPLITS) + 1):
                programs = hidden // block_n * splits
                an_sm = -(-programs // sm_count)
                uneven = -(-most // splits) * splits / most
                idle = an_sm * sm_count / programs
                taste = 1 + 0.05 * abs(an_sm - 3) + 0.03 * (block_n != 32) + 0.03 * (block_k != 128)
                choices.append((uneven * idle * taste, splits, block_n, block_k))
    _, splits, block_n, block_k = min(choices)
    return MoeTiles(up, Tile(block_n, block_k, _stages(block_n, block_k, rows), splits=splits))


def _stages(block_n: int, block_k: int, rows: int) -> int:
    stage = (block_n + rows) * block_k * 2
    wanted = -(-_WEIGHT_BYTES // (block_n * block_k * 2)) + 1
    return max(3, min(wanted, _SHARED_BYTES // stage))
