"""How products are cut up whose shapes were measured, and which way is taken."""

from __future__ import annotations

import functools

from megatron_async.kernels.gemm.estimated_tilings import estimate
from megatron_async.kernels.gemm.tilings import ANY_SHAPE_ROWS, Tiling

# Measured on an H200 by scripts/tune_decode.py, by rows: (n, k) -> tiling.
MEASURED: dict[int, dict[tuple[int, int], Tiling]] = {
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
LIKE = {
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
    up to :data:`ANY_SHAPE_ROWS` rows an estimate.
    """
    for like in LIKE.get(rows, ()):
        tiling = MEASURED[like].get((n, k))
        if tiling is None or tiling.box > boxes:
            continue
        if tiling.fits(n, k, rows, norm, epilogue):
            return tiling
    if rows > ANY_SHAPE_ROWS:
        return None
    return estimate(n, k, rows, norm, epilogue, boxes)


def known(n: int, k: int) -> list[Tiling]:
    """What was measured of this shape at any number of rows."""
    found = [some[n, k] for some in MEASURED.values() if (n, k) in some]
    return list(dict.fromkeys(found))
