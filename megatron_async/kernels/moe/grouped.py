"""The experts of more tokens than a decode step's kernels take: rows ordered by expert, two grouped
GEMMs, and the sum over each token's experts (``grouped_triton.py``).

Launches depend on shapes alone, so a graph may capture them. An expert whose tokens fit into one
tile has its weights read once. The sum is that of ``reference.expert_mlp``, but for what is rounded
on the way: weights are multiplied in before each expert's output is rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.gemm.e4m3_inputs import quantize_inputs
from megatron_async.kernels.moe.grouped_triton import (
    grouped_down_kernel,
    grouped_up_kernel,
    sum_kernel,
)
from megatron_async.kernels.moe.many import wide
from megatron_async.kernels.moe.many.order import Order, launch_options, order_slots
from megatron_async.kernels.moe.many.wide import WideTiles
from megatron_async.kernels.moe.mxfp4 import PACKED
from megatron_async.kernels.moe.reference import Routing
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.kernels.shared_memory import (
    block_limit,
    first_that_fits,
    has_async_products,
    loop_buffers,
)

_SUM_BLOCK = 1024
_TOGETHER = 16
"""Tiles of rows that run together with the same columns of the weights."""


class GroupedWeights(NamedTuple):
    """Parameters of experts, contiguous from multiples of 16 bytes on.

    ``w1`` is ``[experts, 2I or I, H]``, ``w2`` ``[experts, H, I]``, ``b1`` ``[experts, 2I or I]``
    and ``b2`` ``[experts, H]``, the last two or None. The first two have the dtype of rows, or they
    are e4m3 or MXFP4 with scales as in :class:`~.shape.MoeWeights`.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether they are MXFP4."""
        return self.w1.dtype == PACKED


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Tile sizes of one grouped GEMM.

    Args:
        n, k: rows and columns of the weight in a stage.
        stages: of the software pipeline.
        warps: of a program.
        swap: the weight is the first operand of the instruction.
    """

    n: int
    k: int
    stages: int
    warps: int
    swap: bool = False


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Rows of a tile, and the tiles of the first and of the second GEMM; with ``wide`` both are of
    ``many/wide.py``, with its tiles."""

    m: int
    up: GroupedTile
    down: GroupedTile
    wide: WideTiles | None = None


TILES = (
    GroupedTiles(16, GroupedTile(64, 128, 4, 4), GroupedTile(64, 128, 4, 4)),
    GroupedTiles(32, GroupedTile(64, 128, 4, 4, swap=True), GroupedTile(64, 128, 4, 4, swap=True)),
    GroupedTiles(64, GroupedTile(128, 64, 4, 4), GroupedTile(128, 64, 4, 4)),
    GroupedTiles(128, GroupedTile(256, 64, 4, 8), GroupedTile(256, 64, 4, 8)),
)
"""By rows, the fewest first."""
WIDENED_TILES = tuple(
    GroupedTiles(m, tile, tile)
    for m, tile in (
        (16, GroupedTile(64, 128, 5, 4, swap=True)),
        (32, GroupedTile(64, 128, 5, 4, swap=True)),
        (64, GroupedTile(64, 128, 4, 4, swap=True)),
        (128, GroupedTile(128, 64, 4, 8, swap=True)),
    )
)
"""Those for weights that are widened, which is done in registers: as first operands they stay
there."""
E4M3_TILES = (
    GroupedTiles(16, GroupedTile(64, 128, 4, 4, swap=True), GroupedTile(64, 128, 4, 4, swap=True)),
    GroupedTiles(32, GroupedTile(64, 128, 4, 4, swap=True), GroupedTile(64, 128, 4, 4, swap=True)),
    GroupedTiles(64, GroupedTile(128, 128, 4, 4), GroupedTile(128, 128, 4, 4)),
    GroupedTiles(128, GroupedTile(128, 128, 4, 8), GroupedTile(128, 128, 4, 8)),
)
"""Those for e4m3 by e4m3: a step is what the tensor cores add up by themselves."""
_MOST_MEAN = (10, 20, 48)
"""The most tokens that an expert has on average, of all tiles but the last: of experts whose tokens
are drawn nearly all fit into one tile then."""
MOST_WIDENED = 512
"""The most tokens of an expert for which weights are widened in each tile: with more it takes less
to multiply them out before."""


def shared_bytes(
    tile: GroupedTile, rows: int, element_size: int, limit: int, weight_size: float | None = None
) -> int:
    """What a program takes of shared memory at most on a device with such a limit.

    Args:
        weight_size: bytes of an element of weights that are widened, half a byte for MXFP4; None
            for those that are not.
    """
    of_rows, widened = (size * tile.k * element_size for size in (rows, tile.n))
    if element_size == 1:
        of_rows += 8 * rows  # and scales, which change hands
    of_weight = int(tile.n * tile.k * (weight_size or element_size))
    buffers, first = loop_buffers(tile.stages), tile.n if tile.swap else rows
    is_packed = (weight_size or 1) < 1
    taken = buffers * (of_rows + of_weight)
    if first >= 64 and element_size <= 2 and has_async_products(limit) and tile.stages > 1:
        taken += of_rows
        if weight_size is None:
            taken += of_weight
        elif is_packed or not tile.swap:
            taken += widened
    elif is_packed:
        taken += widened
    return max(taken, 4 * rows * (tile.n + 4) if tile.swap or rows < 64 else 0)


def smaller(tile: GroupedTile) -> Iterator[GroupedTile]:
    """Tiles that take less: of fewer stages, then of fewer columns of a step, then of fewer rows of
    the weight."""
    n = tile.n
    while n >= 16:
        k = tile.k
        while k >= 16:
            for stages in range(tile.stages, 0, -1):
                yield replace(tile, n=n, k=k, stages=stages)
            k //= 2
        n //= 2


@functools.cache
def choose_tiles(
    number: int,
    element_size: int,
    limit: int,
    weight_size: float | None = None,
    columns: tuple[int, int] = (0, 0),
) -> GroupedTiles:
    """The tiles of :data:`TILES` with a number, or what of them fits a device.

    Args:
        element_size: of rows; 1 for e4m3, by which weights of e4m3 are not widened.
        weight_size: see :func:`shared_bytes`.
        columns: of the first and of the second weight, as many as share a scale that is not one of
            a whole row; 0 for none. A step lies within them.
    """
    all_tiles = TILES if weight_size is None else WIDENED_TILES
    chosen = (E4M3_TILES if element_size == 1 else all_tiles)[number]
    up, down = (
        first_that_fits(
            (first, *smaller(first)),
            lambda each: shared_bytes(each, chosen.m, element_size, limit, weight_size),
            limit,
        )
        for first in (
            replace(tile, k=math.gcd(tile.k, of_group))
            for tile, of_group in zip((chosen.up, chosen.down), columns, strict=True)
        )
    )
    return GroupedTiles(chosen.m, up, down)


def tiles_for(
    weights: GroupedWeights, hidden: Tensor, mean: float, *, gated: bool = True,
    quantizes: bool = False,
) -> GroupedTiles:  # fmt: skip
    """The tiles for rows ``hidden`` if experts have ``mean`` tokens on average. ``quantizes``: rows
    become e4m3."""
    w1, w2, _, _, w1_scale, w2_scale = weights
    limit, size = block_limit(hidden.device), None if w1_scale is None else float(w1.itemsize)
    columns = _columns(w1, w1_scale), _columns(w2, w2_scale)
    if weights.is_packed:
        size, columns = 0.5, (0, 0)
    of_group = tuple(
        0 if count == weight.shape[-1] else count
        for count, weight in zip(columns, (w1, w2), strict=True)
    )
    number = sum(mean > most for most in _MOST_MEAN)
    element_size = hidden.element_size()
    if quantizes:
        element_size, size = w1.itemsize, None
    tiles = choose_tiles(number, element_size, limit, size, (of_group[0], of_group[1]))
    if tiles.m != wide.ROWS or not wide.takes(w1, gated=gated, limit=limit):
        return tiles
    return replace(tiles, wide=wide.TILES)


def _columns(weight: Tensor, scale: Tensor | None) -> int:
    """Columns that share a scale of an e4m3 weight; 0 for one without."""
    return 0 if scale is None else weight.shape[-1] // scale.shape[-1]


def grouped_experts(
    hidden: Tensor,
    routing: Routing,
    weights: GroupedWeights,
    activation: ExpertActivation,
    *,
    num_experts: int | None = None,
    tiles: GroupedTiles | None = None,
    quantizes: bool = False,
) -> Tensor:
    """Each token's experts, weighted and added up in the order of ``routing.ids``, in fp32.

    Args:
        hidden: ``[T, H]``, of a floating dtype.
        quantizes: weights are e4m3, and what they are multiplied by becomes e4m3 too, with as many
            scales a token.
        num_experts: that the router chooses from, of all ranks; None for those of the weights.
            Tiles are chosen by it.
        tiles: in place of those that are chosen.

    Returns:
        ``[T, H]`` like ``hidden``; zeros in rows without experts.
    """
    tokens, top_k = routing.ids.shape
    if tokens == 0:
        return torch.empty_like(hidden)
    experts = len(weights.w1)
    if tiles is None:
        mean = tokens * top_k / (num_experts or experts)
        gated = activation.gated
        tiles = tiles_for(weights, hidden, mean, gated=gated, quantizes=quantizes)
    hidden, ids = hidden.contiguous(), routing.ids.contiguous()
    order = order_slots(ids, experts, tiles.m)
    rows = _rows(hidden, weights.w1_scale, quantizes=quantizes)
    activated = first_layers(rows, order, weights, top_k, activation, tiles)
    rows = _rows(activated, weights.w2_scale, quantizes=quantizes)
    weighted = second_layers(rows, order, weights, routing.weights.contiguous(), tiles)
    return sum_slots(weighted, ids)


class Rows(NamedTuple):
    """``values [..., k]``; if they are e4m3 with ``scale`` fp32 ``[..., groups]``, and ``dtype`` is
    that of results."""

    values: Tensor
    scale: Tensor | None
    dtype: torch.dtype


def _rows(x: Tensor, weight_scale: Tensor | None, *, quantizes: bool) -> Rows:
    if not quantizes:
        return Rows(x, None, x.dtype)
    assert weight_scale is not None
    return Rows(*quantize_inputs(x, weight_scale.shape[-1]), x.dtype)


def first_layers(
    rows: Rows, order: Order, weights: GroupedWeights, top_k: int,
    activation: ExpertActivation, tiles: GroupedTiles,
) -> Tensor:  # fmt: skip
    """First linear layers and activation: ``[T * k, I]`` in the order of the experts."""
    w1, b1, scale = weights.w1, weights.b1, weights.w1_scale
    hidden, of_rows, dtype = rows
    if tiles.wide is not None:
        given = (hidden, order.slots, order.tiles, order.most_tiles, w1, b1)
        return wide.first_layers(*given, top_k, activation, tiles.wide)
    parts = 2 if activation.gated else 1
    inner = w1.shape[1] // parts
    out = hidden.new_empty(order.slots.shape[0], inner, dtype=dtype)

    def launch(tile: GroupedTile) -> None:
        blocks = triton.cdiv(inner, tile.n // parts)
        grouped_up_kernel[(blocks * order.most_tiles,)](
            hidden, hidden if of_rows is None else of_rows,
            _words(w1), w1 if scale is None else scale, hidden if b1 is None else b1,
            order.slots, order.tiles, out, order.most_tiles,
            HIDDEN=hidden.shape[1], INNER=inner, TOP_K=top_k, GATED=activation.gated,
            FUNCTION=activation.function, LIMIT=activation.limit, OFFSET=activation.offset,
            HAS_BIAS=b1 is not None, **_options(tile, tiles.m, hidden, w1, scale),
        )  # fmt: skip

    launch_fitting("grouped experts, first layers", tiles.up, smaller, launch)
    return out


def second_layers(
    rows: Rows, order: Order, weights: GroupedWeights, routing_weights: Tensor,
    tiles: GroupedTiles,
) -> Tensor:  # fmt: skip
    """Second linear layers times the routing weights: ``[T * k, H]`` by slots; anything in those
    without an expert."""
    w2, b2, scale = weights.w2, weights.b2, weights.w2_scale
    activated, of_rows, dtype = rows
    if tiles.wide is not None:
        given = (activated, order.slots, order.tiles, order.most_tiles, w2, b2)
        return wide.second_layers(*given, routing_weights, tiles.wide)
    (count, inner), size = activated.shape, w2.shape[1]
    out = activated.new_empty(count, size, dtype=dtype)

    def launch(tile: GroupedTile) -> None:
        blocks = triton.cdiv(size, tile.n)
        grouped_down_kernel[(blocks * order.most_tiles,)](
            activated, activated if of_rows is None else of_rows,
            _words(w2), w2 if scale is None else scale,
            activated if b2 is None else b2, order.slots, order.tiles, routing_weights, out,
            order.most_tiles, HIDDEN=size, INNER=inner, HAS_BIAS=b2 is not None,
            **_options(tile, tiles.m, activated, w2, scale),
        )  # fmt: skip

    launch_fitting("grouped experts, second layers", tiles.down, smaller, launch)
    return out


def _words(weight: Tensor) -> Tensor:
    """The weight as the kernels read it: MXFP4 by words."""
    return weight.view(torch.int32) if weight.dtype == PACKED else weight


def sum_slots(weighted: Tensor, ids: Tensor) -> Tensor:
    """``[T, H]``: slots ``[T * k, H]`` added up, but for those with a negative id in ``[T, k]``."""
    (tokens, top_k), size = ids.shape, weighted.shape[1]
    out = weighted.new_empty(tokens, size)
    block = min(_SUM_BLOCK, triton.next_power_of_2(size))
    sum_kernel[(tokens, triton.cdiv(size, block))](
        weighted, ids, out, HIDDEN=size, TOP_K=top_k, BLOCK=block, num_warps=4,
        **launch_options(weighted.device),
    )  # fmt: skip
    return out


def _options(
    tile: GroupedTile, rows: int, x: Tensor, weight: Tensor, scale: Tensor | None
) -> dict[str, object]:
    is_packed = weight.dtype == PACKED
    return {
        "COLUMNS": 0 if is_packed else _columns(weight, scale),
        "MXFP4": is_packed,
        "E4M3_ROWS": x.dtype == weight.dtype and x.dtype == torch.float8_e4m3fn,
        "BLOCK_M": rows,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "TOGETHER": _TOGETHER,
        "SWAP": tile.swap,
        "NUM_STAGES": tile.stages,
        "PRECISION": "ieee" if x.dtype is torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **launch_options(x.device),
    }
