"""How the grouped GEMMs of a decode step's experts are divided into programs."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
"""Most rows of a step that the kernels take."""
_SM_SHARED_BYTES, _RESERVED_BYTES = 227 * 1024, 2048
"""Shared memory of an SM, and what a program takes beside its stages."""
_AN_SM = 3
"""Programs that share an SM. With two their gaps show: on an H200 they took 12 % to 45 % longer
over 32 rows."""
_MOST_SPLITS, _MOST_STAGES = 16, 12


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

    A heuristic, measured on an H200 (``scripts/bench_moe.py --sweep``): three programs an SM, and
    as many stages as let them share it. With more than 16 rows the weight comes first.
    """
    up_k = 128 if hidden % 128 == 0 else 64
    up = Tile(64, up_k, _stages(64, up_k, rows, _AN_SM), swap=rows > 16)
    choices = []
    for block_n in (size for size in (16, 32, 64) if hidden % size == 0):
        for block_k in (64, 128):
            most = -(-inner // block_k)
            for splits in range(1, min(most, _MOST_SPLITS) + 1):
                programs = hidden // block_n * splits
                an_sm = -(-programs // sm_count)
                uneven = -(-most // splits) * splits / most
                idle = an_sm * sm_count / programs
                taste = (
                    1
                    + 0.05 * abs(an_sm - _AN_SM)
                    + 0.03 * (block_n != 32)
                    + 0.03 * (block_k != 128)
                )
                choices.append((uneven * idle * taste, splits, block_n, block_k, an_sm))
    _, splits, block_n, block_k, an_sm = min(choices)
    stages = _stages(block_n, block_k, rows, min(an_sm, _AN_SM))
    return MoeTiles(up, Tile(block_n, block_k, stages, splits=splits))


def _stages(block_n: int, block_k: int, rows: int, an_sm: int) -> int:
    """With so many programs on an SM; one stage more than it has buffers."""
    stage = (block_n + rows) * block_k * 2
    return max(3, min((_SM_SHARED_BYTES // an_sm - _RESERVED_BYTES) // stage + 1, _MOST_STAGES))
