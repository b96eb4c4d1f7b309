"""How products of few rows with a weight (``linear.cu``) are cut up: what can be built, what was
measured, and what is estimated for other shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

STORE, ADD, SILU_GATE, GELU_TANH, GELU = range(5)
"""Epilogues."""
NO_NORM, RMS_NORM, LAYER_NORM = range(3)

MAX_ROWS = 64
ANY_SHAPE_ROWS = 32
"""More rows are multiplied by boxes alone, and only weights of shapes that were measured."""
MULTIPROCESSORS = 132
"""Of an H100 or H200: tilings are chosen for about so many blocks."""
SHARED_BYTES = 227 * 1024
UNIT = 64
"""K is cut into stages of so many."""


class Tiling(NamedTuple):
    """See ``linear.cu``: tiles of 16 rows a warp, warps in N and K, blocks in K, stages of the
    ring, whether x streams, whether blocks go on to further rows of the weight, whether the blocks
    in K add up through memory, rather than as a cluster, and whether four warps take the tiles
    together, the weight and x in boxes of tensors (Hopper only)."""

    row_tiles: int
    warps_n: int
    warps_k: int
    splits: int
    stages: int
    stream: bool = False
    persistent: bool = False
    memory: bool = False
    box: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight in a block."""
        return 16 * self.row_tiles * self.warps_n

    def blocks(self, n: int) -> int:
        """Blocks that cover ``n`` rows of the weight."""
        return -(-n // self.weight_rows) * self.splits

    def statistic_rows(self, rows: int) -> int:
        """Elements of the residual stream that one partial statistic of epilogue ADD covers."""
        return 16 * min(self.row_tiles * self.warps_n, self.owned(rows))

    @property
    def x_stages(self) -> int:
        """Stages of all buffers of x."""
        return 2 * ((self.stages + 1) // 2 + 1)

    def owned(self, rows: int) -> int:
        """Fragments, of 16 rows of the weight and 8 of x, that a block of a cluster finishes.

        As few as the cluster can, as many in each block that finishes any, and whole columns of
        tiles or equal parts of one, since statistics are of such.
        """
        tiles = self.row_tiles * self.warps_n
        fragments = groups(rows) * tiles
        if self.memory:
            return fragments
        own = -(-fragments // self.splits)
        while fragments % own or (tiles % own and own % tiles):
            own += 1
        return own

    def shared_bytes(self, k: int, rows: int) -> int:
        """About what a block takes."""
        in_cluster = self.splits > 1 and not self.memory
        sent = self.owned(rows) * self.splits * self.warps_k * 512 if in_cluster else 0
        return self._ring_bytes(k, rows) + sent

    def _ring_bytes(self, k: int, rows: int) -> int:
        """Of weights and x, and what little there is else."""
        if self.box:
            return self.stages * (2048 * self.row_tiles + groups(rows) * 1024) + 16384
        warps = self.warps_n * self.warps_k
        slice_k = -(-(k // UNIT) // self.splits) * UNIT
        ring = warps * self.stages * 2048 * self.row_tiles
        if self.stream:
            x = self.x_stages * groups(rows) * 1024
            return ring + x + 8192
        return ring + rows * (slice_k * 2 + 64) + 8192

    def fits(self, n: int, k: int, rows: int, norm: int, epilogue: int) -> bool:
        """Whether the kernel can be built so."""
        split = self.warps_k * self.splits > 1
        return (
            self.warps_n * self.warps_k <= 32
            and k // UNIT >= self.splits * self.warps_k
            and not (self.stream and (self.warps_k > 1 or norm == LAYER_NORM))
            and not (self.stream and self.persistent and k // UNIT % 2)
            and not (self.box and not self.stream)
            and (self.box or rows <= ANY_SHAPE_ROWS)
            and not (self.box and (self.warps_n > 1 or self.row_tiles > 16))
            and not (self.memory and (self.warps_k > 1 or self.splits == 1))
            and not (self.persistent and (split or epilogue == ADD))
            and self.shared_bytes(k, rows) <= SHARED_BYTES
            # Statistics and pairs of gate and up do not stop at the end of the weight.
            and (epilogue in (STORE, GELU, GELU_TANH) or n % self.weight_rows == 0)
        )


def padded(rows: int) -> int:
    """The number of rows of x that a kernel for ``rows`` rows is compiled for: a power of two, and
    48."""
    return 48 if 32 < rows <= 48 else 1 << (rows - 1).bit_length()


def groups(rows: int) -> int:
    """Groups of eight rows of x, for padded ``rows``."""
    return max(1, rows // 8)


LEAST_STAGES = 3
"""With fewer a product waits for each, which costs more than blocks that wait for others."""

_WARPS_N = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_STAGES = (2, 3, 4, 5, 6, 8)


def candidates(
    n: int, k: int, rows: int, norm: int, epilogue: int, *, waves: bool = False
) -> Iterator[Tiling]:
    """Tilings that are not hopeless: enough warps, and enough blocks but not many waves of them.

    ``waves``: many waves, in place of blocks that go on to further rows and cannot split K.
    """
    for row_tiles, warps_n, warps_k, splits in itertools.product(
        (1, 2, 3, 4), _WARPS_N, (1, 2, 4, 8, 16), (1, 2, 4, 8)
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


# Measured on an H200 by scripts/tune_decode.py, by rows: (n, k) -> tiling.
_MEASURED: dict[int, dict[tuple[int, int], Tiling]] = {
    1: {
        (6144, 4096): Tiling(1, 3, 4, 1, 8),
        (4096, 4096): Tiling(1, 16, 1, 6, 6),
        (28672, 4096): Tiling(1, 14, 1, 1, 5),
        (4096, 14336): Tiling(1, 2, 4, 1, 11),
        (128256, 4096): Tiling(1, 8, 1, 1, 5, persistent=True),
        (4096, 1024): Tiling(1, 2, 4, 1, 4),
        (1024, 2048): Tiling(1, 1, 16, 1, 5),
        (6144, 1024): Tiling(2, 2, 4, 1, 6),
        (1024, 3072): Tiling(1, 1, 16, 1, 6),
        (151936, 1024): Tiling(3, 4, 1, 1, 7, persistent=True),
        (2304, 768): Tiling(2, 1, 8, 1, 3),
        (768, 768): Tiling(2, 1, 8, 1, 3),
        (3072, 768): Tiling(3, 1, 8, 1, 4),
        (768, 3072): Tiling(1, 1, 8, 1, 13),
        (50257, 768): Tiling(1, 12, 1, 1, 4),
        (3072, 2048): Tiling(8, 1, 1, 4, 7, stream=True, box=True),
        (2048, 2048): Tiling(1, 4, 1, 3, 11),
        (16384, 2048): Tiling(1, 8, 1, 2, 6),
        (2048, 8192): Tiling(1, 1, 8, 2, 5),
        (128256, 2048): Tiling(2, 8, 1, 1, 2, stream=True),
        (5120, 3072): Tiling(2, 1, 4, 3, 2),
        (3072, 3072): Tiling(1, 16, 1, 8, 4),
        (16384, 3072): Tiling(1, 4, 1, 1, 11, stream=True),
        (3072, 8192): Tiling(3, 1, 4, 2, 8),
        (128256, 3072): Tiling(3, 11, 1, 1, 2, persistent=True),
        (4096, 2048): Tiling(2, 2, 2, 2, 5),
        (12288, 2048): Tiling(1, 6, 2, 1, 8),
        (2048, 6144): Tiling(1, 1, 8, 2, 4),
        (151936, 2048): Tiling(1, 12, 1, 1, 3, persistent=True),
        (6144, 2560): Tiling(3, 1, 8, 1, 2),
        (2560, 4096): Tiling(1, 1, 8, 1, 5),
        (19456, 2560): Tiling(2, 4, 2, 1, 3),
        (2560, 9728): Tiling(1, 10, 1, 6, 10),
        (151936, 2560): Tiling(1, 12, 1, 1, 4, stream=True, persistent=True),
        (24576, 4096): Tiling(1, 6, 2, 1, 4),
        (4096, 12288): Tiling(1, 2, 4, 1, 12),
        (151936, 4096): Tiling(12, 1, 1, 1, 7, stream=True, persistent=True, box=True),
    },
    4: {
        (28672, 4096): Tiling(1, 14, 1, 2, 3, stream=True),
        (6144, 1024): Tiling(2, 2, 4, 1, 6),
        (2304, 768): Tiling(1, 7, 2, 4, 2),
        (3072, 768): Tiling(1, 2, 4, 1, 4),
        (768, 3072): Tiling(1, 6, 1, 8, 6),
        (19456, 2560): Tiling(2, 16, 1, 3, 2),
    },
    8: {
        (4096, 4096): Tiling(1, 8, 1, 6, 5),
        (28672, 4096): Tiling(7, 1, 1, 1, 6, stream=True, box=True),
        (4096, 14336): Tiling(4, 1, 1, 4, 10, stream=True, memory=True, box=True),
        (128256, 4096): Tiling(8, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (4096, 1024): Tiling(1, 4, 1, 4, 2, stream=True),
        (1024, 2048): Tiling(2, 1, 1, 8, 4, stream=True, box=True),
        (6144, 1024): Tiling(4, 1, 1, 2, 6, stream=True, box=True),
        (151936, 1024): Tiling(3, 4, 1, 1, 5, persistent=True),
        (3072, 768): Tiling(3, 1, 8, 1, 2),
        (768, 768): Tiling(1, 6, 1, 4, 3, stream=True),
        (2048, 2048): Tiling(1, 4, 1, 3, 11, stream=True),
        (16384, 2048): Tiling(8, 1, 1, 1, 12, stream=True, box=True),
        (2048, 8192): Tiling(1, 8, 1, 6, 11),
        (5120, 3072): Tiling(4, 1, 1, 4, 8, stream=True, box=True),
        (3072, 3072): Tiling(1, 4, 2, 8, 2),
        (3072, 8192): Tiling(8, 1, 1, 4, 12, stream=True, box=True),
        (128256, 3072): Tiling(8, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (12288, 2048): Tiling(1, 6, 2, 1, 7),
        (2048, 6144): Tiling(1, 8, 1, 6, 12),
        (6144, 2560): Tiling(1, 3, 4, 2, 3),
        (2560, 4096): Tiling(2, 1, 1, 4, 10, stream=True, box=True),
        (19456, 2560): Tiling(4, 1, 1, 1, 4, stream=True, box=True),
        (2560, 9728): Tiling(1, 10, 1, 6, 9),
        (151936, 2560): Tiling(12, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (24576, 4096): Tiling(1, 8, 1, 2, 3, stream=True),
        (4096, 12288): Tiling(4, 1, 1, 4, 10, stream=True, memory=True, box=True),
    },
    16: {
        (6144, 4096): Tiling(13, 1, 1, 4, 6, stream=True, box=True),
        (4096, 4096): Tiling(1, 16, 1, 6, 5),
        (28672, 4096): Tiling(1, 14, 1, 2, 3, stream=True),
        (4096, 14336): Tiling(1, 4, 1, 4, 10, stream=True, memory=True),
        (4096, 1024): Tiling(1, 8, 1, 8, 3),
        (1024, 2048): Tiling(2, 4, 1, 8, 10, stream=True),
        (6144, 1024): Tiling(1, 2, 4, 1, 4),
        (151936, 1024): Tiling(9, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (2304, 768): Tiling(1, 7, 2, 4, 2),
        (768, 768): Tiling(2, 1, 8, 1, 6),
        (3072, 768): Tiling(1, 2, 4, 1, 4),
        (768, 3072): Tiling(1, 6, 1, 8, 6),
        (3072, 2048): Tiling(3, 1, 1, 4, 6, stream=True, box=True),
        (2048, 2048): Tiling(1, 8, 1, 6, 6, stream=True),
        (2048, 8192): Tiling(1, 8, 1, 6, 10),
        (128256, 2048): Tiling(12, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (5120, 3072): Tiling(3, 1, 1, 2, 11, stream=True, box=True),
        (3072, 3072): Tiling(1, 4, 1, 6, 5, stream=True),
        (16384, 3072): Tiling(1, 8, 1, 2, 5, stream=True),
        (3072, 8192): Tiling(3, 1, 1, 4, 12, stream=True, memory=True, box=True),
        (128256, 3072): Tiling(8, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (12288, 2048): Tiling(1, 3, 1, 2, 5, stream=True),
        (2048, 6144): Tiling(1, 8, 1, 6, 8),
        (6144, 2560): Tiling(1, 10, 1, 8, 2),
        (2560, 4096): Tiling(1, 5, 1, 6, 6),
        (19456, 2560): Tiling(2, 16, 1, 3, 2),
        (2560, 9728): Tiling(1, 5, 1, 6, 6, stream=True),
        (24576, 4096): Tiling(1, 8, 1, 2, 3, stream=True),
        (4096, 12288): Tiling(4, 1, 1, 4, 9, stream=True, memory=True, box=True),
    },
    32: {
        (6144, 4096): Tiling(6, 1, 1, 2, 10, stream=True, box=True),
        (4096, 4096): Tiling(4, 1, 1, 4, 4, stream=True, box=True),
        (28672, 4096): Tiling(2, 7, 1, 1, 3, stream=True),
        (4096, 14336): Tiling(4, 1, 1, 4, 7, stream=True, memory=True, box=True),
        (128256, 4096): Tiling(8, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (4096, 1024): Tiling(1, 3, 4, 1, 6),
        (1024, 2048): Tiling(2, 4, 1, 8, 9, stream=True),
        (6144, 1024): Tiling(3, 1, 1, 2, 6, stream=True, box=True),
        (1024, 3072): Tiling(2, 4, 2, 8, 3),
        (151936, 1024): Tiling(12, 1, 1, 1, 5, stream=True, persistent=True, box=True),
        (2304, 768): Tiling(1, 6, 2, 4, 2),
        (768, 768): Tiling(2, 1, 8, 1, 3),
        (3072, 768): Tiling(1, 8, 1, 3, 4),
        (768, 3072): Tiling(4, 1, 1, 8, 6, stream=True, box=True),
        (50257, 768): Tiling(2, 12, 1, 1, 2),
        (3072, 2048): Tiling(8, 1, 1, 4, 6, stream=True, box=True),
        (2048, 2048): Tiling(1, 4, 1, 6, 6, stream=True),
        (16384, 2048): Tiling(4, 1, 1, 1, 8, stream=True, box=True),
        (2048, 8192): Tiling(4, 1, 1, 8, 5, stream=True, box=True),
        (128256, 2048): Tiling(16, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (5120, 3072): Tiling(6, 1, 1, 4, 5, stream=True, box=True),
        (3072, 3072): Tiling(1, 6, 1, 6, 4, stream=True),
        (16384, 3072): Tiling(4, 1, 1, 1, 8, stream=True, box=True),
        (3072, 8192): Tiling(8, 1, 1, 4, 9, stream=True, box=True),
        (128256, 3072): Tiling(3, 7, 1, 1, 2, stream=True, persistent=True),
        (4096, 2048): Tiling(10, 1, 1, 4, 5, stream=True, box=True),
        (12288, 2048): Tiling(3, 1, 1, 1, 8, stream=True, box=True),
        (2048, 6144): Tiling(4, 1, 1, 8, 4, stream=True, box=True),
        (151936, 2048): Tiling(12, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (6144, 2560): Tiling(3, 1, 1, 2, 9, stream=True, box=True),
        (2560, 4096): Tiling(1, 10, 1, 6, 7),
        (19456, 2560): Tiling(8, 1, 1, 1, 4, stream=True, box=True),
        (2560, 9728): Tiling(1, 5, 1, 6, 5, stream=True),
        (151936, 2560): Tiling(3, 6, 1, 1, 2, stream=True),
        (24576, 4096): Tiling(12, 1, 1, 2, 2, stream=True, box=True),
        (4096, 12288): Tiling(4, 1, 1, 4, 7, stream=True, memory=True, box=True),
        (151936, 4096): Tiling(3, 4, 1, 1, 2, stream=True),
    },
    48: {
        (4096, 1024): Tiling(3, 1, 1, 2, 7, stream=True, box=True),
        (1024, 2048): Tiling(1, 1, 1, 2, 10, stream=True, box=True),
        (6144, 1024): Tiling(3, 1, 1, 2, 7, stream=True, box=True),
        (1024, 3072): Tiling(2, 1, 1, 4, 8, stream=True, memory=True, box=True),
        (3072, 2048): Tiling(3, 1, 1, 2, 7, stream=True, box=True),
        (2048, 2048): Tiling(2, 1, 1, 2, 9, stream=True, box=True),
        (16384, 2048): Tiling(8, 1, 1, 1, 9, stream=True, box=True),
        (2048, 8192): Tiling(4, 1, 1, 4, 10, stream=True, memory=True, box=True),
        (5120, 3072): Tiling(3, 1, 1, 2, 7, stream=True, box=True),
        (3072, 3072): Tiling(2, 1, 1, 2, 10, stream=True, box=True),
        (3072, 8192): Tiling(3, 1, 1, 4, 8, stream=True, memory=True, box=True),
        (4096, 2048): Tiling(3, 1, 1, 2, 7, stream=True, box=True),
        (12288, 2048): Tiling(3, 1, 1, 1, 8, stream=True, box=True),
        (2048, 6144): Tiling(4, 1, 1, 4, 10, stream=True, memory=True, box=True),
        (2560, 4096): Tiling(2, 1, 1, 2, 10, stream=True, box=True),
        (2560, 9728): Tiling(5, 1, 1, 4, 10, stream=True, memory=True, box=True),
    },
    64: {
        (6144, 4096): Tiling(4, 1, 1, 2, 4, stream=True, box=True),
        (4096, 4096): Tiling(4, 1, 1, 2, 10, stream=True, box=True),
        (28672, 4096): Tiling(14, 1, 1, 1, 4, stream=True, box=True),
        (4096, 14336): Tiling(4, 1, 1, 2, 7, stream=True, box=True),
        (128256, 4096): Tiling(16, 1, 1, 1, 2, stream=True, persistent=True, box=True),
        (4096, 1024): Tiling(4, 1, 1, 2, 6, stream=True, box=True),
        (1024, 2048): Tiling(4, 1, 1, 8, 6, stream=True, box=True),
        (6144, 1024): Tiling(4, 1, 1, 2, 6, stream=True, box=True),
        (1024, 3072): Tiling(4, 1, 1, 8, 6, stream=True, box=True),
        (151936, 1024): Tiling(12, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (3072, 2048): Tiling(8, 1, 1, 4, 7, stream=True, box=True),
        (2048, 2048): Tiling(2, 1, 1, 2, 8, stream=True, box=True),
        (16384, 2048): Tiling(4, 1, 1, 1, 6, stream=True, box=True),
        (2048, 8192): Tiling(4, 1, 1, 8, 5, stream=True, box=True),
        (128256, 2048): Tiling(8, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (5120, 3072): Tiling(6, 1, 1, 4, 3, stream=True, box=True),
        (3072, 3072): Tiling(8, 1, 1, 8, 7, stream=True, box=True),
        (16384, 3072): Tiling(4, 1, 1, 1, 6, stream=True, box=True),
        (3072, 8192): Tiling(8, 1, 1, 4, 7, stream=True, box=True),
        (128256, 3072): Tiling(8, 1, 1, 1, 4, stream=True, persistent=True, box=True),
        (4096, 2048): Tiling(4, 1, 1, 2, 10, stream=True, box=True),
        (12288, 2048): Tiling(4, 1, 1, 1, 6, stream=True, box=True),
        (2048, 6144): Tiling(4, 1, 1, 8, 5, stream=True, box=True),
        (151936, 2048): Tiling(12, 1, 1, 1, 6, stream=True, persistent=True, box=True),
        (6144, 2560): Tiling(3, 1, 1, 2, 6, stream=True, box=True),
        (2560, 4096): Tiling(8, 1, 1, 8, 2, stream=True, box=True),
        (19456, 2560): Tiling(8, 1, 1, 1, 4, stream=True, box=True),
        (2560, 9728): Tiling(8, 1, 1, 8, 2, stream=True, box=True),
        (151936, 2560): Tiling(12, 1, 1, 1, 6, stream=True, persistent=True, box=True),
    },
}
_LIKE = {
    1: (1, 32), 2: (1, 8, 32), 4: (4, 8, 1, 32), 8: (8, 1, 32), 16: (16, 32, 1), 32: (32, 1),
    48: (48, 64), 64: (64,),
}  # fmt: skip
"""Whose measurements a number of rows goes by."""


@functools.cache
def choose(
    n: int, k: int, rows: int, norm: int, epilogue: int, boxes: bool = True
) -> Tiling | None:
    """The tiling for a product ``[rows, k] x [n, k]``; None if no tiling fits.

    The measured one of this shape, unless it takes boxes and ``boxes`` are not to be had. Else for
    up to :data:`ANY_SHAPE_ROWS` rows an estimate: the most even cut, or what :func:`_cost` says.
    """
    for like in _LIKE.get(rows, ()):
        tiling = _MEASURED[like].get((n, k))
        if tiling is None or tiling.box > boxes:
            continue
        if tiling.fits(n, k, rows, norm, epilogue):
            return tiling
    if rows > ANY_SHAPE_ROWS:
        return None
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
    return (rows > 16 and not deep) or (rows <= 8 and wide)


def box_cuts(n: int) -> Iterator[Tiling]:
    """Cuts into boxes, of two stages, where there are enough blocks but not many waves of them."""
    for tiles, splits, memory in itertools.product(range(1, 17), (1, 2, 4, 8), (False, True)):
        cut = Tiling(tiles, 1, 1, splits, 2, stream=True, memory=memory, box=True)
        blocks = cut.blocks(n)
        persistent = blocks > 4 * MULTIPROCESSORS
        if 96 <= blocks <= 2 * MULTIPROCESSORS + 24 or persistent:
            yield cut._replace(persistent=persistent)


def even_tilings(
    cuts: Iterable[Tiling], n: int, k: int, rows: int, norm: int, epilogue: int
) -> list[Tiling]:
    """Cuts with as many stages as let all their blocks run at once or go on to further rows, and
    no fewer than :data:`LEAST_STAGES`: first those that give every multiprocessor about as much to
    read, with enough of it on its way."""
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
        scores[tiling] = score - 1 / cut.row_tiles if cut.persistent else score
    return sorted(scores, key=scores.__getitem__, reverse=True)


def known(n: int, k: int) -> list[Tiling]:
    """What was measured of this shape at any number of rows."""
    found = [some[n, k] for some in _MEASURED.values() if (n, k) in some]
    return list(dict.fromkeys(found))


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
