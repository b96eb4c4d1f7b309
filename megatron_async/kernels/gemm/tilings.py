"""How products of few rows with a weight (``linear.cu``) can be cut up."""

from __future__ import annotations

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
MOST_IN_CLUSTER = 8
"""Blocks, without a special permission."""
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
            and self.row_tiles <= 16
            and (self.memory or self.splits <= MOST_IN_CLUSTER)
            and k // UNIT >= self.splits * self.warps_k
            and not (self.stream and (self.warps_k > 1 or norm == LAYER_NORM))
            and not (self.stream and self.persistent and k // UNIT % 2)
            and not (self.box and not self.stream)
            and (self.box or rows <= ANY_SHAPE_ROWS)
            and not (self.box and self.warps_n > 1)
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
