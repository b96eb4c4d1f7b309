"""How the grouped GEMMs of a decode step's experts are divided into programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_async.kernels.shared_memory import (
    HOPPER_BYTES,
    first_that_fits,
    has_async_products,
    loop_buffers,
)

MAX_ROWS = 64
"""Most rows of a step that the kernels take."""
_RESERVED_BYTES = 2048
"""Shared memory that a program takes beside its stages."""
_AN_SM = 3
"""Programs that share an SM. With two their gaps show: on an H200 they took 12 % to 45 % longer
over 32 rows."""
_MOST_SPLITS, _MOST_STAGES = 16, 12

CHOICE_ROWS = 4
"""Rows, and warps, of a program that chooses in a kernel of its own."""
MOST_TOGETHER = 32
"""Padded experts, and rows, for which one program chooses, the last of those that made logits. A
router of 128 experts takes 13 us with it at four rows and 31 at 64, and 7 and 13 without (H200)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of one grouped GEMM.

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

    @property
    def statistic_rows(self) -> int:
        """Elements that one partial statistic covers, of the second GEMM."""
        return self.block_n


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """The tiles of the first and of the second grouped GEMM of a layer."""

    up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class RouterTile:
    """The tile of the router.

    Args:
        block_h: elements of the hidden size in a program.
        chunk: rows that the last program chooses for at once.
    """

    block_h: int
    chunk: int


def padded_rows(rows: int) -> int:
    """Rows of the tile that holds ``rows``: 16, 32 or 64."""
    return next(size for size in (16, 32, MAX_ROWS) if rows <= size)


def shared_bytes(
    tile: Tile, rows: int, element_size: int, limit: int, weight_size: float | None = None
) -> int:
    """What a program takes of shared memory at most on a device with such a limit, for padded
    ``rows``: its buffers, or its sums where they change hands at the end.

    Args:
        weight_size: bytes of an element of weights that are widened; None for those that are not,
            half a byte for MXFP4.
            An asynchronous product has them in registers if they come first, else in a buffer,
            through which those of MXFP4 go in any case.
    """
    of_rows = rows * tile.block_k * element_size
    of_weight = int(tile.block_n * tile.block_k * (weight_size or element_size))
    widened, is_packed = tile.block_n * tile.block_k * element_size, (weight_size or 1) < 1
    buffers, first = loop_buffers(tile.stages), tile.block_n if tile.swap else rows
    taken = buffers * (of_rows + of_weight)
    if first >= 64 and element_size == 2 and has_async_products(limit) and tile.stages > 1:
        taken += of_rows
        if weight_size is None:
            taken += of_weight
        elif is_packed or not tile.swap:
            taken += widened
    elif is_packed:  # numbers of a word go to other threads
        taken += widened
    return max(taken, 4 * rows * (tile.block_n + 4))


def smaller(tile: Tile) -> Iterator[Tile]:
    """Tiles that take less: with fewer stages, then with fewer columns in one. What others read of
    a launch stays as it is: its splits and its partial statistics."""
    yield from (replace(tile, stages=stages) for stages in range(tile.stages - 1, 0, -1))
    block_k = tile.block_k // 2
    while block_k >= 16:
        yield from (replace(tile, block_k=block_k, stages=stages) for stages in (3, 2, 1))
        block_k //= 2


def router_shared_bytes(tile: RouterTile, rows: int, columns: int, element_size: int) -> int:
    """What a program of the router takes at most, for padded ``rows`` and padded experts: normed
    rows and the weights of 16 experts; and at the end the keys of a chunk, where groups of experts
    change hands."""
    operands = (rows + 16) * tile.block_h * element_size
    return max(operands, 8 * tile.chunk * columns)


def chosen_apart(rows: int, columns: int) -> bool:
    """Whether experts are chosen in a kernel of its own, for ``rows`` rows and padded experts."""
    return max(rows, columns) > MOST_TOGETHER


def fewer_rows(rows: int) -> Iterator[int]:
    """What a program that chooses takes fewer of."""
    while rows > 1:
        rows //= 2
        yield rows


def smaller_chunks(tile: RouterTile) -> Iterator[RouterTile]:
    """What takes less, but with the partial sums that the workspace has room for."""
    chunk = tile.chunk
    while chunk > 1:
        chunk //= 2
        yield replace(tile, chunk=chunk)


@functools.cache
def router_tile(
    rows: int, columns: int, *, element_size: int = 2, limit: int = HOPPER_BYTES
) -> RouterTile:
    """The tile for a step of ``rows`` rows. The elements of a program depend on the device alone,
    so a row's logits do not depend on the number of rows."""
    block_h = 256
    while (MAX_ROWS + 16) * block_h * element_size > limit and block_h > 16:
        block_h //= 2
    padded = padded_rows(rows)
    tile = RouterTile(block_h, 4 if rows <= 4 else min(padded, 32))
    return first_that_fits(
        (tile, *smaller_chunks(tile)),
        lambda each: router_shared_bytes(each, padded, columns, element_size),
        limit,
    )


@functools.cache
def choose_tiles(
    hidden: int,
    inner: int,
    rows: int,
    sm_count: int,
    *,
    element_size: int = 2,
    limit: int = HOPPER_BYTES,
    weight_size: float | None = None,
    scale_steps: tuple[int, int] = (0, 0),
) -> MoeTiles:
    """Tiles for weights of ``hidden`` by ``inner``, and padded ``rows``.

    A heuristic, measured on an H200 (``scripts/bench_moe.py --sweep``): three programs an SM, and
    as many stages as let them share it. With more than 16 rows the weight comes first. Tiles that
    would take more shared memory than ``limit`` get fewer stages.

    Args:
        weight_size: bytes of an element of the weights; None is ``element_size``.
        scale_steps: see :class:`~.shape.MoeShape`.
    """
    up_k = _divides(128 if hidden % 128 == 0 else 64, scale_steps[0])
    of_weight = 2 if weight_size is None else weight_size
    up = Tile(64, up_k, _stages(64, up_k, rows, _AN_SM, limit, of_weight), swap=rows > 16)
    choices = []
    for block_n in (size for size in (16, 32, 64) if hidden % size == 0):
        for block_k in sorted({_divides(size, scale_steps[1]) for size in (64, 128)}):
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
    stages = _stages(block_n, block_k, rows, min(an_sm, _AN_SM), limit, of_weight)
    down = Tile(block_n, block_k, stages, splits=splits)
    return MoeTiles(
        *(
            first_that_fits(
                (tile, *smaller(tile)),
                lambda each: shared_bytes(each, rows, element_size, limit, weight_size),
                limit,
            )
            for tile in (up, down)
        )
    )


def _divides(block_k: int, step: int) -> int:
    """Return ``block_k`` or what of it is in one step of scales."""
    return math.gcd(block_k, step)


def _stages(
    block_n: int, block_k: int, rows: int, an_sm: int, sm_bytes: int, weight_size: float
) -> int:
    """Return the stages with ``an_sm`` programs on an SM: one more than it has buffers."""
    stage = int((block_n * weight_size + rows * 2) * block_k)
    return max(3, min((sm_bytes // an_sm - _RESERVED_BYTES) // stage + 1, _MOST_STAGES))
