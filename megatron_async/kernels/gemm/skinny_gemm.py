"""Products of few rows with a weight: how ``linear.cu`` is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import Kernel, kernel
from megatron_async.kernels.gemm.tilings import (
    LAYER_NORM,
    MULTIPROCESSORS,
    SHARED_BYTES,
    SILU_GATE,
    UNIT,
    Tiling,
    groups,
)

ALONE_BYTES = 116 * 1024
ALONE_BLOCKS = 100
"""Where there are so many blocks, but not more than multiprocessors, each takes at least
``ALONE_BYTES``: started while the kernel before still runs, two of them would else share one
multiprocessor and others have none."""


class Linear:
    """One product of a model, for batches of up to ``rows`` rows.

    Args:
        n, k: shape of the weight.
        rows: of x at most, see :func:`padded`.
        norm, norm_statistics: of the input, and the norm (``RMS_NORM``, ``LAYER_NORM``) that
            reads the statistics which epilogue ``ADD`` writes.
    """

    def __init__(
        self,
        n: int,
        k: int,
        rows: int,
        norm: int,
        epilogue: int,
        norm_statistics: int,
        tiling: Tiling,
        device: torch.device,
    ) -> None:
        self.kernel: Kernel = kernel(
            "linear",
            defines(n, k, rows, norm, epilogue, norm_statistics, tiling),
            device,
        )
        blocks = tiling.blocks(n)
        if tiling.persistent:
            resident = max(1, SHARED_BYTES // (self.kernel.shared_bytes + 1024))
            by_threads = 2048 // self.kernel.threads
            blocks = min(blocks, MULTIPROCESSORS * min(resident, by_threads, 2))
        self._grid = (blocks, 1, 1)
        self._partials: Tensor | None = None
        self._arrivals: Tensor | None = None
        if tiling.memory:
            tiles = blocks // tiling.splits
            self._partials = torch.empty(blocks * tiling.weight_rows * max(8, rows), device=device)
            self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)
        self.statistic_rows = tiling.statistic_rows(rows)
        self._n, self._k, self._rows, self._tiling = n, k, rows, tiling
        self._gated = epilogue == SILU_GATE
        self._maps: dict[Any, Any] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, Tensor | None, float] | None = None,
        statistics: Tensor | None = None,
        residual: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
        statistics_out: Tensor | None = None,
    ) -> None:
        """``out [M, N] = epilogue(norm(x [M, K]) weight^T)``; all contiguous bfloat16.

        Args:
            norm: (weight, bias, epsilon); for RMSNorm ``x`` is multiplied by the weight already.
            statistics: fp32 ``[M, tiles, 2]``, those of x (without the weight).
            residual: ``[M, N]`` that epilogue ``ADD`` adds; may be ``out``.
            scaled: with epilogue ``ADD`` before RMSNorm, its weight ``[N]`` and where ``out`` times
                that goes, ``[M, N]``.
            statistics_out: fp32, those of ``out`` that epilogue ``ADD`` emits.
        """
        norm_weight, norm_bias, eps = norm if norm is not None else (None, None, 0.0)
        next_weight, scaled_out = scaled or (None, None)
        self.kernel.launch(
            self._grid, x, weight, bias, norm_weight, norm_bias, statistics,
            0 if statistics is None else statistics.shape[1], float(eps), residual, out,
            next_weight, scaled_out, statistics_out, x.shape[0], out.stride(0),
            self._partials, self._arrivals, *(self._maps_of(weight, x) if self._tiling.box else []),
        )  # fmt: skip

    def _maps_of(self, weight: Tensor, x: Tensor) -> list[Any]:
        """The weight in boxes of a block's rows, x in boxes of all its rows."""
        row, tiles = self._k * 2, self._tiling.row_tiles
        if weight.data_ptr() not in self._maps:
            sizes, strides, box = [self._k, self._n], [row], [UNIT, 16 * tiles]
            if self._gated:  # eight rows of gate, eight of up
                sizes, box = [self._k, 8, 2, self._n // 16], [UNIT, 8, 2, tiles]
                strides = [row, self._n // 2 * row, 8 * row]
            self._maps[weight.data_ptr()] = cuda.tensor_map(weight, sizes, strides, box)
        key = x.data_ptr(), x.shape[0]
        if key not in self._maps:
            box = [UNIT, 8 * groups(self._rows)]
            self._maps[key] = cuda.tensor_map(x, [self._k, x.shape[0]], [row], box)
        return [self._maps[weight.data_ptr()], self._maps[key]]


def defines(
    n: int, k: int, rows: int, norm: int, epilogue: int, norm_statistics: int, tiling: Tiling
) -> dict[str, int]:
    """Macros of ``linear.cu``."""
    return {
        "MT": groups(rows), "XR": rows,
        "RT": tiling.row_tiles, "WR": tiling.warps_n, "WK": tiling.warps_k,
        "C": tiling.splits, "ST": tiling.stages, "STREAM": int(tiling.stream),
        "PERSISTENT": int(tiling.persistent), "K": k, "N": n, "NORM": norm,
        "EPILOGUE": epilogue, "STATS": norm_statistics, "MEMORY": int(tiling.memory),
        "BOX": int(tiling.box), "OWN": tiling.owned(rows),
        "LEAST": ALONE_BYTES if ALONE_BLOCKS <= tiling.blocks(n) <= MULTIPROCESSORS else 0,
    }  # fmt: skip


def statistics_of(hidden: Tensor, norm: int, per_tile: int) -> Tensor:
    """What epilogue ``ADD`` emits for ``hidden [M, H]``, with PyTorch: fp32 ``[M, tiles, 2]``."""
    tiles = hidden.float().unflatten(1, (-1, per_tile))
    mean = tiles.mean(2) if norm == LAYER_NORM else torch.zeros_like(tiles[..., 0])
    return torch.stack((mean, (tiles - mean[..., None]).square().sum(2)), 2)
