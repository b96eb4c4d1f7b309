"""How the kernels of ``wide_triton.py`` are launched. ``kernels/moe/grouped.py`` calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.moe.many.order import launch_options
from megatron_async.kernels.moe.many.wide_triton import (
    grouped_wide_down_kernel,
    grouped_wide_up_kernel,
)
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.kernels.shared_memory import has_async_products

ROWS = 128
"""The rows of a tile."""
_TOGETHER = 16
"""Tiles of rows that run together with the same columns of the weights."""
_PROGRAMS_ELSEWHERE = 3
"""Programs of the second kernel where there are no multiprocessors: in tests."""


@dataclass(frozen=True, slots=True)
class WideTiles:
    """Tile sizes of both kernels.

    Args:
        rows: of a tile; half of them if an expert has no more left.
        n, k: rows of the weight and columns of a stage. In the first kernel half of the rows are of
            the gate.
        stages, warps: of the software pipeline, and of a program.
    """

    rows: int = ROWS
    n: int = 256
    k: int = 64
    stages: int = 4
    warps: int = 8

    @property
    def shared_bytes(self) -> int:
        """What a program takes of shared memory at most: stages, and a tile that is stored by
        parts."""
        return self.stages * (self.rows + self.n) * self.k * 2 + self.rows * self.n + 1024


TILES = WideTiles()


def smaller(tiles: WideTiles) -> Iterator[WideTiles]:
    """Tiles that take less, with the same bits: of fewer stages."""
    for stages in range(tiles.stages - 1, 0, -1):
        yield replace(tiles, stages=stages)


def takes(w1: Tensor, *, gated: bool, limit: int) -> bool:
    """Whether these kernels compute experts whose first weights are ``w1``, ``[experts, 2I or I,
    H]``, on a GPU whose CTAs have ``limit`` bytes of shared memory: gated ones, of 16 bits, with
    whole stages."""
    return (
        gated
        and w1.element_size() == 2
        and w1.shape[-1] % TILES.k == 0
        and has_async_products(limit)
        and TILES.shared_bytes <= limit
    )


def first_layers(
    hidden: Tensor, slots: Tensor, order_tiles: Tensor, most_tiles: int, weight: Tensor,
    bias: Tensor | None, top_k: int, activation: ExpertActivation, tiles: WideTiles,
) -> Tensor:  # fmt: skip
    """See ``grouped.first_layers``; ``order_tiles`` has the number of tiles behind them."""
    inner, width = weight.shape[1] // 2, tiles.n // 2
    out = hidden.new_empty(slots.shape[0], inner)
    halves = weight.view(-1, inner, weight.shape[-1])
    of_weight = TensorDescriptor.from_tensor(halves, [2, width, tiles.k])

    def launch(tiles: WideTiles) -> None:
        grouped_wide_up_kernel[(triton.cdiv(inner, width) * most_tiles,)](
            hidden, of_weight, hidden if bias is None else bias, slots,
            order_tiles, out, most_tiles, HIDDEN=hidden.shape[1], INNER=inner, TOP_K=top_k,
            WIDTH=width, FUNCTION=activation.function, LIMIT=activation.limit,
            OFFSET=activation.offset, HAS_BIAS=bias is not None, **_options(tiles, hidden.device),
        )  # fmt: skip

    launch_fitting("wide grouped experts, first layers", tiles, smaller, launch)
    return out


def second_layers(
    activated: Tensor, slots: Tensor, order_tiles: Tensor, most_tiles: int, weight: Tensor,
    bias: Tensor | None, routing_weights: Tensor, tiles: WideTiles,
) -> Tensor:  # fmt: skip
    """See ``grouped.second_layers``."""
    (rows, inner), size, device = activated.shape, weight.shape[1], activated.device
    out = activated.new_empty(rows, size)
    programs = _PROGRAMS_ELSEWHERE
    if device.type == "cuda":
        programs = cuda.sm_count(device.index or 0)
    operands = (
        _descriptor(activated, [tiles.rows, tiles.k]), _descriptor(weight, [tiles.n, tiles.k])
    )  # fmt: skip

    def launch(tiles: WideTiles) -> None:
        grouped_wide_down_kernel[(min(programs, triton.cdiv(size, tiles.n) * most_tiles),)](
            *operands, activated if bias is None else bias, slots, order_tiles, routing_weights,
            out, most_tiles, HIDDEN=size, INNER=inner, BLOCK_N=tiles.n, HAS_BIAS=bias is not None,
            **_options(tiles, device),
        )  # fmt: skip

    launch_fitting("wide grouped experts, second layers", tiles, smaller, launch)
    return out


def _descriptor(matrices: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of matrices that lie one behind the other."""
    return TensorDescriptor.from_tensor(matrices.view(-1, matrices.shape[-1]), block)


def _options(tiles: WideTiles, device: torch.device) -> dict[str, object]:
    return {
        "BLOCK_M": tiles.rows,
        "BLOCK_K": tiles.k,
        "TOGETHER": _TOGETHER,
        "NUM_STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **launch_options(device),
    }
