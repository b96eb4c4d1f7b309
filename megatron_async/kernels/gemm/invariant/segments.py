"""Into which segments a batch-invariant product divides K: each is added up from 0 on, and then
their sums are, one after the other."""

from __future__ import annotations

import torch

FEW_COLUMNS = 8192
"""Products with no more may have segments."""
SEGMENT_STEP = 128
"""Segments are multiples of it; each tile's columns of K divide it."""


def segments_of(dtype: torch.dtype, columns: int, depth: int) -> int:
    """How many segments K has: for few columns and a large K programs must share it to be enough.
    Part of what a row's bits are, so the number of rows must not be asked for."""
    if dtype is torch.float32 or columns > FEW_COLUMNS:
        return 1
    if depth >= 8192:
        return 4
    return 2 if depth >= 2048 and columns <= 4096 else 1


def segment_size(depth: int, segments: int) -> int:
    """Columns of K of all segments but the last one, which has the rest; 0 of one alone, since
    what kernels are compiled with need not know them."""
    if segments == 1:
        return 0
    return -(-depth // (segments * SEGMENT_STEP)) * SEGMENT_STEP
