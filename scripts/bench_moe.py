"""Time the kernels of a decode step's experts on a GPU, launch by launch, for several tiles.

    python scripts/bench_moe.py
    python scripts/bench_moe.py --shape mixtral --rows 1,32 --sweep

Each line is a launch: mean microseconds of calls in a CUDA graph that goes round several layers, so
that weights come from memory; the experts of a layer that its rows need; GB/s of their weights; and
the share of the floor, their bytes over the bandwidth that a copy reaches. ``layer`` is all of the
launches, as a step has them; ``one kernel`` is the same in one (``kernels/moe/row.py``), for rows
that it takes, with its own error, also as three launches; ``widened`` are the linear layers in CUDA
that experts in e4m3 and MXFP4 have, and of many rows in bfloat16 (``kernels/moe/widened``).
``error`` is the largest difference from the reference in units of the largest value; above 2e-2 the
exit status is 1. ``--sweep`` times other tiles too, of the kernels that a model has, and says which
won. With ``--scale-columns N`` weights are e4m3, and N columns of a row share a scale, or with 0
all of them; with ``--mxfp4`` they are MXFP4.

    python scripts/bench_moe.py --tokens 65,128,256,1024,4096

times the experts of more tokens (``kernels/moe/grouped.py``), whole and by launches, and PyTorch's
``grouped_mm``, for ``--shape`` or for Qwen3-30B-A3B and GPT-OSS-20B; shares are those of the floor,
at 4.3 TB/s or 780 TFLOP/s. It also says which rows of a tile win, and with ``--sweep`` which tiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import bench_grouped
import torch
from bench_kernels import microseconds

from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.kernels.gemm.skinny_gemm import statistics_of
from megatron_async.kernels.gemm.tile_config import RMS_NORM
from megatron_async.kernels.moe import row
from megatron_async.kernels.moe.decode import MoeDecode
from megatron_async.kernels.moe.decode_reference import moe_decode_reference
from megatron_async.kernels.moe.mxfp4 import pack
from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings
from megatron_async.kernels.moe.shape import MoeShape, MoeWeights, ScaleColumns
from megatron_async.kernels.moe.tiles import (
    MoeTiles,
    Tile,
    padded_rows,
    shared_bytes,
)
from megatron_async.kernels.moe.widened import experts as widened
from megatron_async.models.quantized.values import quantize

EPS, ERROR_LIMIT, SM_SHARED_BYTES = 1e-6, 2e-2, 227 * 1024
NORMED: dict[str, Any] = {"pre_softmax": True, "normalize": True}
SHAPES = {
    "qwen3-30b-a3b": MoeShape(
        2048, 768, RouterSettings(num_experts=128, top_k=8, **NORMED), ExpertActivation()
    ),
    "mixtral": MoeShape(
        4096, 14336, RouterSettings(num_experts=8, top_k=2, **NORMED), ExpertActivation()
    ),
    "deepseek-v2-lite": MoeShape(
        2048,
        1408,
        RouterSettings(num_experts=64, top_k=6, pre_softmax=True),
        ExpertActivation(),
        shared=2,
    ),
    "gpt-oss-20b": MoeShape(
        2880,
        2880,
        RouterSettings(num_experts=32, top_k=4),
        ExpertActivation(function="quick_gelu", limit=7.0, offset=1.0),
    ),
}
OF_TOKENS = ("qwen3-30b-a3b", "gpt-oss-20b")
LAYERS = {1: 6, 2: 5, 4: 4, 8: 3}
"""Layers that a graph goes round, by rows; 2 for more."""


def with_scales(shape: MoeShape, columns: int | None, *, packed: bool = False) -> MoeShape:
    """The shape with e4m3 weights, and a scale for ``columns`` of a row or 0 for each row; None
    leaves it as it is, or makes it MXFP4 if ``packed``."""
    if packed:
        return replace(shape, is_packed=True)
    if columns is None:
        return shape
    rows = shape.hidden, shape.inner, shape.hidden, shape.shared * shape.inner
    found = [columns or row for row in rows[: 4 if shape.shared else 2]]
    return replace(shape, scale_columns=ScaleColumns(*found))


class Layer(NamedTuple):
    """One layer's parameters and input, and the kernels with buffers of their own."""

    weights: MoeWeights
    hidden: torch.Tensor
    statistics: torch.Tensor
    kernels: MoeDecode


def make_layer(shape: MoeShape, rows: int, device: torch.device, sm_count: int) -> Layer:
    """Drawn weights and rows; bfloat16."""

    def drawn(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_(0, scale)

    experts, hidden, inner = shape.settings.num_experts, shape.hidden, shape.inner
    halves, shared = 2 if shape.activation.gated else 1, shape.shared * shape.inner
    weights = MoeWeights(
        (torch.ones(hidden, device=device, dtype=torch.bfloat16), None),
        drawn(experts, hidden, scale=hidden**-0.5),
        drawn(experts, halves * inner, hidden, scale=hidden**-0.5),
        drawn(experts, hidden, inner, scale=inner**-0.5),
        shared_w1=drawn(halves * shared, hidden, scale=hidden**-0.5) if shared else None,
        shared_w2=drawn(hidden, shared, scale=shared**-0.5) if shared else None,
    )
    for name, columns in (shape.scale_columns or ScaleColumns(0, 0))._asdict().items():
        weight = getattr(weights, name)
        if shape.scale_columns is not None and weight is not None:
            numbers, scale = quantize(weight, weight.shape[-1] // columns)
            weights = weights._replace(**{name: numbers, f"{name}_scale": scale})
    if shape.is_packed:
        (w1, w1_scale), (w2, w2_scale) = pack(weights.w1), pack(weights.w2)
        weights = weights._replace(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    x = drawn(rows, hidden)
    kernels = MoeDecode(shape, device, sm_count=sm_count, one_kernel=False)
    return Layer(weights, x, statistics_of(x, RMS_NORM, 16), kernels)


def with_tiles(layer: Layer, tiles: MoeTiles) -> Layer:
    """The same layer with kernels of other tiles."""
    rows, old = layer.hidden.shape[0], layer.kernels
    kernels = MoeDecode(old.shape, layer.hidden.device, tiles=tiles, one_kernel=False)
    kernels.route(layer.weights, layer.hidden, layer.statistics, EPS)
    kernels.up(layer.weights, rows)
    return layer._replace(kernels=kernels)


def up_tiles(rows: int) -> Iterator[Tile]:
    """Tiles of the first GEMM that fit into an SM."""
    for block_n, block_k, swap in (
        (32, 128, False), (32, 256, False), (64, 64, False), (64, 128, False), (64, 64, True),
        (64, 128, True), (128, 64, True),
    ):  # fmt: skip
        for an_sm in (2, 3):
            yield from _staged(Tile(block_n, block_k, 0, swap=swap), rows, an_sm)


def down_tiles(shape: MoeShape, rows: int, sm_count: int) -> Iterator[Tile]:
    """Tiles of the second GEMM that fit into an SM."""
    for block_n, block_k, swap in (
        (16, 128, False), (32, 128, False), (32, 64, False), (64, 128, False), (64, 64, True),
        (64, 128, True),
    ):  # fmt: skip
        most = -(-shape.inner // block_k)
        for splits in (1, 2, 3, 4, 6, 8, 12):
            programs = -(-shape.hidden // block_n) * splits
            if splits <= most and 1.4 <= programs / sm_count <= 3.1:
                an_sm = round(programs / sm_count + 0.4)
                tile = Tile(block_n, block_k, 0, splits=splits, swap=swap)
                yield from _staged(tile, rows, an_sm)


def _staged(tile: Tile, rows: int, an_sm: int) -> Iterator[Tile]:
    """Yield it with as many stages as let ``an_sm`` programs share an SM."""
    stage = (tile.block_n + rows) * tile.block_k * 2
    stages = min(12, (SM_SHARED_BYTES // an_sm - 2048) // stage + 1)
    tile = replace(tile, stages=stages)
    if stages >= 3 and shared_bytes(tile, rows, 2, SM_SHARED_BYTES) <= SM_SHARED_BYTES:
        yield tile


class Bench:
    """Layers of one shape under ``rows`` rows."""

    def __init__(
        self, shape: MoeShape, rows: int, bandwidth: float, device: torch.device, sm_count: int
    ) -> None:
        self.shape, self.rows, self.bandwidth = shape, rows, bandwidth
        self.sm_count = sm_count
        count = LAYERS.get(rows, 2)
        self.layers = [make_layer(shape, rows, device, sm_count) for _ in range(count)]
        for layer in self.layers:
            layer.kernels.route(layer.weights, layer.hidden, layer.statistics, EPS)
        self.experts = sum(int(layer.kernels.count) for layer in self.layers) / len(self.layers)
        self.out = torch.empty_like(self.layers[0].hidden)
        self.scaled = torch.empty_like(self.out)
        self.statistics = torch.empty(rows * shape.hidden // 8, 2, device=device)

    def line(self, label: str, byte_count: float, call: Callable[[Layer], object]) -> float:
        """Time and print a launch that reads ``byte_count`` bytes; returns microseconds."""
        layers = self.layers
        us = microseconds(lambda number: call(layers[number % len(layers)]))
        floor = byte_count / self.bandwidth * 1e6
        rate = byte_count / us / 1e3
        print(f"{label:60s} {us:8.2f} us {rate:7.0f} GB/s {floor / us:6.1%}", flush=True)
        return us

    def route(self, layer: Layer) -> None:
        """The first launch."""
        layer.kernels.route(layer.weights, layer.hidden, layer.statistics, EPS)

    def up(self, layer: Layer) -> None:
        """The second."""
        layer.kernels.up(layer.weights, self.rows)

    def down(self, layer: Layer) -> None:
        """The third, as a step has it."""
        covered = layer.kernels.statistic_rows(self.rows)
        tiles = self.rows * self.shape.hidden // covered
        layer.kernels.down(
            layer.weights, self.out, layer.hidden,
            self.statistics[:tiles].view(self.rows, -1, 2), (layer.weights.norm[0], self.out),
        )  # fmt: skip

    def all_three(self, layer: Layer) -> None:
        """A layer."""
        self.route(layer)
        self.up(layer)
        self.down(layer)

    def of_few(self, label: str, *, one_launch: bool = True, **options: Any) -> float:
        """Time and print the one kernel, as a step has it; returns its error."""
        layer = self.layers[0]
        kernel = row.MoeRow(self.shape, layer.hidden.device, self.sm_count, **options)
        found = row.Found(
            layer.kernels.ids[: self.rows], layer.kernels.weights[: self.rows], layer.kernels.count
        )
        tiles = self.rows * self.shape.hidden // kernel.statistic_rows
        statistics = self.statistics[:tiles].view(self.rows, -1, 2)

        def call(layer: Layer) -> None:
            kernel(
                layer.weights, layer.hidden, layer.statistics, EPS, self.out, found,
                residual=layer.hidden, statistics_out=statistics,
                scaled=(layer.weights.norm[0], self.scaled), one_launch=one_launch,
            )  # fmt: skip

        router = 2.0 * self.shape.settings.num_experts * self.shape.hidden
        self.line(label, router + sum(self.weight_bytes), call)
        call(layer)
        return self.difference(self.out, layer.hidden)

    def few(self, sweep: bool) -> float:
        """The one kernel, or why it does not take the rows; returns its largest error."""
        refused = row.why_not(self.shape, self.rows, torch.bfloat16, self.sm_count)
        if refused is not None:
            print(f"one kernel: {refused}")
            return 0.0
        options: list[dict[str, Any]] = [{}, {"one_launch": False}]
        if sweep:
            coarse = row.tile(self.shape.hidden, self.sm_count) == 16
            for threads in (128, 256, 512) if coarse else (128, 256):
                options += [{"threads": threads, "loads": loads} for loads in (4, 8, 16)]
        worst = 0.0
        for each in options:
            label = " ".join(f"{name} {value}" for name, value in each.items())
            error = self.of_few(f"one kernel {label}", **each)
            print(f"  error {error:.2g}")
            worst = max(worst, error)
        return worst

    def widened(self, sweep: bool) -> None:
        """The linear layers in CUDA, where a model has these."""
        if not self.is_widened:
            return
        options: list[tuple[int | None, int]] = [(None, widened.STAGES)]
        if sweep:
            options = [(threads, st) for threads in (256, 352, 384, 448) for st in (2, 3, 4, 6)]
        (first, second), device = self.weight_bytes, self.out.device
        for threads, stages in options:
            kernels = widened.WidenedExperts(
                self.shape, device, self.sm_count, threads=threads, stages=stages
            )
            if not kernels.fit(self.rows):
                continue
            label = f"threads {threads or 'that fit'} stages {stages}"
            self._widened_lines(kernels, label, first, second)

    def _widened_lines(
        self, kernels: widened.WidenedExperts, label: str, first: float, second: float
    ) -> None:
        def up(layer: Layer) -> None:
            kernels.up(layer.weights, self.rows, layer.kernels.normed, layer.kernels.chosen)

        def down(layer: Layer) -> None:
            kernels.down(layer.weights, self.rows, layer.kernels.chosen, widened.Sums(self.out))

        self.line(f"widened up    {label}", first, up)
        self.line(f"widened down  {label}", second, down)

    @property
    def weight_bytes(self) -> tuple[float, float]:
        """Bytes of the needed experts' weights, without scales: of the first GEMM and of the
        second."""
        one = (self.shape.weight_size or 2.0) * self.shape.hidden * self.shape.inner * self.experts
        return one * (2 if self.shape.activation.gated else 1), one

    def error(self) -> float:
        """The first layer's largest difference from the reference."""
        layer, out = self.layers[0], torch.empty_like(self.out)
        layer.kernels(layer.weights, layer.hidden, layer.statistics, EPS, out)
        return self.difference(out, None)

    def difference(self, out: torch.Tensor, residual: torch.Tensor | None) -> float:
        """How far the first layer's output is from the reference, with the experts just chosen."""
        layer = self.layers[0]
        routing = layer.kernels.routing(self.rows)
        expected = moe_decode_reference(
            self.shape, layer.weights, layer.hidden, EPS, routing=routing, residual=residual
        ).float()
        return float((out.float() - expected).abs().max() / expected.abs().max())

    @property
    def is_widened(self) -> bool:
        """A model's linear layers of experts are ``kernels/moe/widened``'s."""
        refused = widened.why_not(self.shape, torch.bfloat16)
        return refused is None and self.rows >= widened.least_rows(self.shape)

    def chosen(self) -> None:
        """The launches with the tiles that a model has."""
        first, second = self.weight_bytes
        router = 2.0 * self.shape.settings.num_experts * self.shape.hidden
        tiles = self.layers[0].kernels.tiles(self.rows)
        self.line("router", router, self.route)
        if self.is_widened:
            self.line("layer, widened", router + first + second, self.all_three)
            self.layers = [with_tiles(layer, tiles) for layer in self.layers]
        self.line(f"up    {short(tiles.up)}", first, self.up)
        self.line(f"down  {short(tiles.down)}", second, self.down)
        self.line("layer", router + first + second, self.all_three)

    def sweep(self) -> None:
        """Other tiles, each launch by itself, and a layer with the best two."""
        own, padded = self.layers, padded_rows(self.rows)
        fixed = own[0].kernels.tiles(self.rows)
        first, second = self.weight_bytes
        steps = self.shape.scale_steps
        times: dict[str, list[tuple[float, Tile]]] = {"up": [], "down": []}
        for tile in (each for each in up_tiles(padded) if steps[0] % each.block_k == 0):
            self.layers = [with_tiles(layer, MoeTiles(tile, fixed.down)) for layer in own]
            times["up"].append((self.line(f"up    {short(tile)}", first, self.up), tile))
        down = down_tiles(self.shape, padded, self.sm_count)
        for tile in (each for each in down if steps[1] % each.block_k == 0):
            self.layers = [with_tiles(layer, MoeTiles(fixed.up, tile)) for layer in own]
            times["down"].append((self.line(f"down  {short(tile)}", second, self.down), tile))
        best = MoeTiles(*(min(found, key=lambda pair: pair[0])[1] for found in times.values()))
        self.layers = [with_tiles(layer, best) for layer in own]
        self.line(
            f"best: up {short(best.up)} down {short(best.down)}", first + second, self.all_three
        )
        self.layers = own


def short(tile: Tile) -> str:
    """A tile in a word."""
    swapped = " swap" if tile.swap else ""
    return f"{tile.block_n}x{tile.block_k} s{tile.stages} w{tile.warps} k{tile.splits}{swapped}"


def many_tokens(args: argparse.Namespace) -> int:
    """The experts of many tokens. Returns 1 if results differ from the reference."""
    torch.manual_seed(0)
    tokens = [int(count) for count in args.tokens.split(",")]
    names = OF_TOKENS if args.shape is None else (args.shape,)
    errors = [bench_grouped.run(name, SHAPES[name], tokens, sweep=args.sweep) for name in names]
    return int(not max(errors) < ERROR_LIMIT)


def main() -> int:
    """Run the script. Returns 1 if results differ from the reference."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: qwen3-30b-a3b")
    parser.add_argument("--tokens", metavar="T,...")
    parser.add_argument("--rows", default="1,8,32,64", metavar="R,...")
    parser.add_argument("--sweep", action="store_true")
    of_few = "experts in bfloat16 by kernels/moe/widened in steps of few rows too"
    parser.add_argument("--widened-16-bits", action="store_true", help=of_few)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--scale-columns", type=int, metavar="N")
    kinds.add_argument("--mxfp4", action="store_true")
    args = parser.parse_args()
    if args.widened_16_bits:
        widened.LEAST_16_BIT_ROWS = 1
    if args.tokens is not None:
        return many_tokens(args)
    args.shape = args.shape or OF_TOKENS[0]
    shape = with_scales(SHAPES[args.shape], args.scale_columns, packed=args.mxfp4)
    device, wrong = torch.device("cuda", torch.cuda.current_device()), False
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: a copy reaches {bandwidth / 1e12:.2f} TB/s")
    for rows in map(int, args.rows.split(",")):
        torch.manual_seed(rows)
        bench = Bench(shape, rows, bandwidth, device, sm_count)
        error = bench.error()
        print(f"\n{args.shape}, {rows} rows, {bench.experts:.1f} experts, error {error:.2g}")
        wrong |= not error < ERROR_LIMIT
        bench.chosen()
        bench.widened(args.sweep)
        wrong |= not bench.few(args.sweep) < ERROR_LIMIT
        if args.sweep and not bench.is_widened:
            bench.sweep()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
