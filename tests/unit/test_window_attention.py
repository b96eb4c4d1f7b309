"""Decode attention of windows: several tokens of a row in one kernel, next to each other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_attention import unsupported
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both, relative_error
from tests.support.window_cases import Row, WindowCase

__all__ = ["device"]


def rows_of(window: int, lengths: list[int]) -> list[Row]:
    """Whole windows, windows of which less and less is left, a dead row, and padding."""
    rows = [Row(length, window) for length in lengths]
    rows += [Row(length, 1 + n % window) for n, length in enumerate(lengths[:window])]
    return [*rows, Row(lengths[-1], window, dead=True), Row(0, 0), Row(lengths[-1], 0)]


_LENGTHS = [0, 1, 15, 16, 17, 63, 64, 200, 700, 1]
_BORDERS = [0, 13, 15, 16, 127, 128, 129, 260]
"""Of blocks and tiles, and of KV splits of 128 tokens; a window of 4 crosses each of them."""
_WIDE = [(37 * row) % 611 for row in range(90)]
_GPU = [
    ((head_dim, group, block_size, norm, True), window, cluster, split_tokens, lengths)
    for head_dim, group, block_size, norm in (
        (64, 1, 16, True),
        (64, 8, 64, False),
        (80, 2, 16, True),
        (80, 4, 64, False),
        (128, 2, 64, True),
        (128, 4, 16, False),
        (128, 8, 64, False),
        (256, 1, 16, False),
    )
    for window in (1, 2, 3, 4, 5)
    for cluster, split_tokens, lengths in (
        *((cluster, 2048, _LENGTHS) for cluster in (1, 2, 8)),
        *((1, 128, _BORDERS), (2, 64, _BORDERS), (8, 16, _BORDERS), (1, 64, _WIDE)),
    )
]


@on_both(
    *("shape", "window", "cluster", "split_tokens", "lengths"),
    gpu=_GPU,
    small=[
        ((128, 4, 16, False, True), 4, 2, 2048, [0, 15, 33]),
        ((64, 2, 64, True, True), 3, 1, 64, [0, 62, 64, 130]),
        ((80, 8, 16, False, True), 5, 4, 16, [0, 14, 63, 130]),
        ((32, 1, 16, False, False), 2, 1, 2048, [(7 * row) % 33 for row in range(31)]),
    ],
)
class TestWindows:
    def test_equal_float64_and_append_what_counts(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        window: int,
        cluster: int,
        split_tokens: int,
        lengths: list[int],
    ) -> None:
        case = WindowCase(device, shape, window, rows_of(window, lengths))
        before, (wanted, cache) = case.cache.clone(), case.wanted()
        out, counted = case.attend(case.kernel(cluster, split_tokens)), case.counted
        assert out.isfinite().all(), "padding too"
        assert relative_error(out[counted], wanted[counted]) < LIMIT
        for token in counted.nonzero().flatten().tolist():
            assert relative_error(out[token], wanted[token]) < 2 * LIMIT, token
        flat, mapping = case.cache.flatten(1, 2), case.mapping[counted]
        assert relative_error(flat[:, mapping], cache.flatten(1, 2)[:, mapping]) < LIMIT
        untouched = torch.ones(flat.shape[1], dtype=torch.bool, device=device)
        untouched[mapping] = untouched[: shape[2]] = False
        kept = before.flatten(1, 2)[:, untouched].view(torch.int16)
        assert torch.equal(flat[:, untouched].view(torch.int16), kept)
