"""Time the experts of many tokens on a GPU: grouped GEMMs of this package and of PyTorch.
``bench_moe.py --tokens`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from bench_kernels import microseconds
from torch import Tensor

from megatron_async.kernels.moe import grouped
from megatron_async.kernels.moe.grouped import TILES, GroupedTile, GroupedTiles, GroupedWeights
from megatron_async.kernels.moe.reference import Routing, expert_mlp, route, router_logits
from megatron_async.kernels.moe.routing.wide_triton import route_many
from megatron_async.kernels.moe.shape import MoeShape
from megatron_async.kernels.shared_memory import HOPPER_BYTES

BANDWIDTH, RATE = 4.3e12, 780e12
"""Bytes and operations of bfloat16 a second that floors are made of: an H200's."""


class GroupedBench:
    """One layer's experts under tokens whose experts are drawn."""

    def __init__(self, shape: MoeShape, device: torch.device, *, bias: bool) -> None:
        def drawn(*size: int, scale: float = 1.0) -> Tensor:
            return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_(0, scale)

        self._drawn, self.shape, self._device = drawn, shape, device
        experts, hidden, inner = shape.settings.num_experts, shape.hidden, shape.inner
        first = inner * (2 if shape.activation.gated else 1)
        self.w1 = drawn(experts, first, hidden, scale=hidden**-0.5)
        self.w2 = drawn(experts, hidden, inner, scale=inner**-0.5)
        self.b1 = drawn(experts, first) if bias else None
        self.b2 = drawn(experts, hidden) if bias else None
        self.router = drawn(experts, hidden, scale=hidden**-0.5)
        self.weights = GroupedWeights(self.w1, self.w2, self.b1, self.b2)

    def run(self, tokens: int, *, sweep: bool) -> float:
        """Time and print all ways; returns the error of ours."""
        settings = self.shape.settings
        self.hidden = self._drawn(tokens, self.shape.hidden)
        scores = torch.rand(tokens, settings.num_experts, device=self._device)
        weights, ids = torch.softmax(scores, -1).topk(settings.top_k)
        self.routing = Routing(ids.int(), weights.float())
        slots, chosen = tokens * settings.top_k, self.routing.ids.unique().numel()
        ours, theirs = self.ours(None), self.reference()
        error = float((ours.double() - theirs).norm() / theirs.double().norm())
        print(f"\n{tokens} tokens, {chosen} experts of {slots / chosen:.1f}, error {error:.2g}")
        one = self.shape.hidden * self.shape.inner
        self._one = max(2.0 * chosen * one / BANDWIDTH, 2.0 * slots * one / RATE) * 1e6
        self._line("PyTorch's grouped_mm, all around it", 3, self.reference)
        if hasattr(F, "grouped_mm"):
            self._line("PyTorch's grouped_mm, alone", 3, self._products())
        tiles = grouped.tiles_for(self.weights, self.hidden, slots / settings.num_experts)
        self._line(f"ours, {tiles.m} rows of a tile", 3, lambda: self.ours(None))
        order = grouped.order_slots(self.routing.ids, settings.num_experts, tiles.m)
        weighted = self.second(self.first(order, tiles), order, tiles)
        self._line("  order", 0, lambda: self._order(tiles))
        self._line("  sum", 0, lambda: grouped.sum_slots(weighted, self.routing.ids))
        self._line("router, PyTorch", 0, self._routed_by_torch)
        self._line("router, ours", 0, lambda: route_many(self.hidden, self.router, settings))
        self._best(sweep)
        return error

    def ours(self, tiles: GroupedTiles | None) -> Tensor:
        """``[T, H]`` with the kernels of this package."""
        return grouped.grouped_experts(
            self.hidden, self.routing, self.weights, self.shape.activation, tiles=tiles
        )  # fmt: skip

    def reference(self) -> Tensor:
        """``[T, H]`` with PyTorch."""
        return expert_mlp(
            self.hidden, self.routing, self.w1, self.w2, self.shape.activation, b1=self.b1,
            b2=self.b2,
        )  # fmt: skip

    def first(self, order: grouped.Order, tiles: GroupedTiles) -> Tensor:
        """The first grouped GEMM."""
        rows = grouped.Rows(self.hidden, None, self.hidden.dtype)
        return grouped.first_layers(
            rows, order, self.weights, self.shape.settings.top_k, self.shape.activation,
            tiles,
        )  # fmt: skip

    def second(self, x: Tensor, order: grouped.Order, tiles: GroupedTiles) -> Tensor:
        """The second one."""
        rows = grouped.Rows(x, None, x.dtype)
        return grouped.second_layers(rows, order, self.weights, self.routing.weights, tiles)

    def _routed_by_torch(self) -> Routing:
        return route(router_logits(self.hidden, self.router), self.shape.settings)

    def _order(self, tiles: GroupedTiles) -> grouped.Order:
        return grouped.order_slots(self.routing.ids, self.shape.settings.num_experts, tiles.m)

    def _products(self) -> Callable[[], object]:
        """PyTorch's two products of rows that are in order already."""
        flat = self.routing.ids.flatten()
        x = self.hidden[flat.argsort() // self.shape.settings.top_k]
        ends = flat.bincount(minlength=len(self.w1)).cumsum(0).int()
        activated = x.new_zeros(len(flat), self.shape.inner)

        def call() -> None:
            F.grouped_mm(x, self.w1.transpose(1, 2), offs=ends)
            F.grouped_mm(activated, self.w2.transpose(1, 2), offs=ends)

        return call

    def _line(self, label: str, weights: int, call: Callable[[], object]) -> float:
        """Time and print a call that multiplies by ``weights`` of an expert's three matrices."""
        us = microseconds(lambda number: call())
        share = f"{weights * self._one / us:6.1%}" if weights else ""
        print(f"{label:48s} {us:9.2f} us {share}", flush=True)
        return us

    def _best(self, sweep: bool) -> None:
        """Each tile of rows with tiles of each GEMM, and which are best together."""
        found = []
        for chosen in TILES:
            order = self._order(chosen)
            ups = {
                tile: self._up(order, GroupedTiles(chosen.m, tile, tile))
                for tile in (others(chosen.m) if sweep else (chosen.up,))
            }
            x = self.first(order, chosen)
            downs = {
                tile: self._down(x, order, GroupedTiles(chosen.m, tile, tile))
                for tile in (others(chosen.m) if sweep else (chosen.down,))
            }
            up, down = min(ups, key=ups.__getitem__), min(downs, key=downs.__getitem__)
            found.append((ups[up] + downs[down], GroupedTiles(chosen.m, up, down)))
        us, best = min(found, key=lambda pair: pair[0])
        print(f"  best: {best.m} rows, up {short(best.up)}, down {short(best.down)}: {us:.2f} us")

    def _up(self, order: grouped.Order, tiles: GroupedTiles) -> float:
        parts = 2 if self.shape.activation.gated else 1
        label = f"  up   {tiles.m:3d} rows, {short(tiles.up)}"
        return self._line(label, parts, lambda: self.first(order, tiles))

    def _down(self, x: Tensor, order: grouped.Order, tiles: GroupedTiles) -> float:
        label = f"  down {tiles.m:3d} rows, {short(tiles.down)}"
        return self._line(label, 1, lambda: self.second(x, order, tiles))


def others(m: int) -> Iterator[GroupedTile]:
    """Tiles for ``m`` rows that fit into an SM, a few of them."""
    few = ((32, 128, 5, 4, False), (64, 128, 5, 4, False), (64, 256, 3, 4, False),
           (128, 64, 5, 4, False), (64, 128, 5, 4, True), (128, 64, 5, 4, True),
           (128, 128, 3, 8, True))  # fmt: skip
    many = ((128, 64, 3, 4, False), (128, 64, 4, 8, False), (128, 128, 3, 8, False),
            (256, 64, 3, 8, False), (256, 64, 4, 8, False))  # fmt: skip
    for sizes in few if m < 64 else many:
        tile = GroupedTile(*sizes)
        if grouped.shared_bytes(tile, m, 2, HOPPER_BYTES) <= HOPPER_BYTES:
            yield tile


def short(tile: GroupedTile) -> str:
    """A tile in a word."""
    swapped = " swap" if tile.swap else ""
    return f"{tile.n}x{tile.k} s{tile.stages} w{tile.warps}{swapped}"


def run(name: str, shape: MoeShape, tokens: list[int], *, sweep: bool) -> float:
    """Time a layer's experts for each number of tokens; returns the largest error."""
    print(f"\n{name}")
    device = torch.device("cuda", torch.cuda.current_device())
    bench = GroupedBench(replace(shape, shared=0), device, bias=name.startswith("gpt-oss"))
    return max(bench.run(count, sweep=sweep) for count in tokens)
