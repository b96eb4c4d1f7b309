"""Skinny GEMMs of 65 to 128 rows of x: by the wgmma kernel, with bfloat16 weights, of shapes that a
table has for so many rows.

The sums of a tile of W take twice the registers, so a CTA has half as many tiles, or two warpgroups
that divide them. All CTAs together read x once for each of their tiles of W, from L2: with 128 rows
and tiles of 256 rows of W that is half of what the weights are. So the largest tiles are best, and
K is split where there would be too few CTAs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async.kernels import trial

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.tile_config import TileConfig

FEW_ROWS, WIDE_ROWS = 64, 128
"""Rows of x at most: of the other skinny GEMMs, and of these."""
MAX_SUMS = 128
"""Sums in the registers of a thread, which has up to 255."""
MAX_TILES = 16
"""Tiles of 16 rows of W that one copy brings."""


def most_rows() -> int:
    """Rows of a decode step that may run in fused kernels."""
    return WIDE_ROWS if trial.WIDE_ROWS else FEW_ROWS


def wgmma_takes(config: TileConfig, rows: int, scale_columns: int) -> bool:
    """Whether the wgmma kernel takes padded ``rows`` with the tiles of ``config``. Several
    warpgroups are for many rows, and these are for bfloat16 weights."""
    if rows <= FEW_ROWS:
        return config.warps_n == 1
    sums = -(-config.row_tiles // 4) * rows // 2
    # Who comes last reads a sum's parts at once, next to its own.
    parts = config.split_k if config.workspace else 1
    return (
        rows <= WIDE_ROWS
        and not scale_columns
        and config.warps_n <= 2
        and config.row_tiles * config.warps_n <= MAX_TILES
        and sums <= (MAX_SUMS if parts <= 4 else MAX_SUMS // 2)
    )
