"""Kernels of steps by time, and products in one order by tile: what
``scripts/bench_invariance.py`` prints by ``--profile`` and ``--products``."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCTS = {
    "qkv": (6144, 4096),
    "projection": (4096, 4096),
    "fc1": (28672, 4096),
    "fc2": (4096, 14336),
    "head": (128256, 4096),
}
"""Columns and K of the products of Llama-8B."""
ROWS = (1, 32, 128)
PREFILL_ROWS = 8192
COLD_BYTES = 250e6
"""Weights that are read between two readings of the same: more than any L2 cache holds."""
TOP = 25


def print_kernels(what: str, run: Callable[[], int]) -> None:
    """Kernels by the time they take in the steps that ``run`` runs, whose number it returns: from
    the begin of each to that of the next one, since a kernel that is launched early waits in its
    own time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps = run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted(
        (each for each in events if each.get("cat") == "kernel"), key=lambda each: each["ts"]
    )
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each, following in itertools.pairwise(kernels):
        grid = "x".join(str(size) for size in each["args"].get("grid", ()))
        times[each["name"][:60], grid].append(following["ts"] - each["ts"])
    total = sum(sum(each) for each in times.values()) / steps
    print(f"\n{what}: {len(kernels) / steps:.1f} kernels a step, {total:.1f} us of kernels a step")
    print("\n| us a step | a step | mean us | grid | kernel |\n|---|---|---|---|---|")
    for (name, grid), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]:
        spent, mean = sum(each) / steps, sum(each) / len(each)
        print(f"| {spent:.1f} | {len(each) / steps:.1f} | {mean:.2f} | {grid} | {name} |")


def print_products(device: torch.device) -> None:
    """Products of each tile beside cuBLAS, in us and GB/s of weights, with weights that are in no
    cache; whether segments of K have programs of their own; and whether bits are those of others.
    """
    from megatron_async.kernels.gemm.invariant import products_triton as products
    from megatron_async.kernels.gemm.invariant import skinny

    device = torch.device(device.type, device.index or 0)
    products.find_tiles(device, torch.bfloat16)
    print("| product | rows | tile | programs | us | GB/s | bits |\n|---|---|---|---|---|---|---|")
    for name, (columns, depth) in PRODUCTS.items():
        segments = products.segments_of(torch.bfloat16, columns, depth)
        weights = _weights(columns, depth, device)
        skinny.load([skinny.Product(columns, depth, segments)], ROWS, device)
        for weight in weights:
            skinny.keep_weight(weight)
        size = columns * depth * 2
        for rows in ROWS:
            x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
            spent = _time(lambda w, x=x: F.linear(x, w), weights)
            _print_product(name, rows, "cuBLAS", "", spent, size, "")
            expected = products.matmul_by_row(x, weights[0].t())
            spent = _time(lambda w, x=x: products.matmul_by_row(x, w.t()), weights)
            _print_product(name, rows, "as chosen", "", spent, size, "")
            for tile, split in itertools.product(products.HALF_TILES, (True, False)):
                if tile.m > max(64, rows):
                    continue
                if not split and (segments == 1 or tile.n > 64):
                    continue
                programs = -(-rows // tile.m) * -(-columns // tile.n) * (segments if split else 1)

                def product(w: Tensor, x: Tensor = x, tile: Any = tile, split: bool = split) -> Any:
                    return products.product(x, w.t(), None, tile, split=split)

                same = "same" if torch.equal(product(weights[0]), expected) else "OTHER"
                spent = _time(product, weights)
                what = f"{tuple(tile)}{' split' if split and segments > 1 else ''}"
                _print_product(name, rows, what, str(programs), spent, size, same)
        if name != "head":
            _print_wide(name, weights, size)
        del weights


def _print_wide(name: str, weights: list[Tensor], size: int) -> None:
    """A product of a step of a prefill, and with SwiGLU where that is fused."""
    from megatron_async.kernels.gemm.invariant import products_triton as products
    from megatron_async.kernels.gemm.invariant.gated_triton import gated_by_row
    from megatron_async.kernels.norm.swiglu import swiglu

    depth = weights[0].shape[1]
    x = torch.randn(PREFILL_ROWS, depth, device=weights[0].device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "cuBLAS": lambda w: F.linear(x, w),
        "by TMA": lambda w: products.matmul_by_row(x, w.t()),
        "(128, 128)": lambda w: products.product(x, w.t(), None, products.HALF_TILES[1]),
    }
    if products.segments_of(x.dtype, len(weights[0]), depth) == 1:
        ways["(128, 256)"] = lambda w: products.product(x, w.t(), None, products.HALF_TILES[0])
    if name == "fc1":
        ways["cuBLAS, SwiGLU"] = lambda w: swiglu(F.linear(x, w))
        ways["with SwiGLU"] = lambda w: gated_by_row(x, w.t())
    for way, product in ways.items():
        spent = _time(product, weights)
        rate = f"{2 * PREFILL_ROWS * weights[0].numel() / spent / 1e6:.0f} TFLOP/s"
        _print_product(name, PREFILL_ROWS, way, rate, spent, size, "")


def _print_product(
    name: str, rows: int, tile: str, programs: str, spent: float, size: int, bits: str
) -> None:
    rate = f"{size / spent / 1e3:.0f}"
    print(f"| {name} | {rows} | {tile} | {programs} | {spent:.1f} | {rate} | {bits} |", flush=True)


def _weights(columns: int, depth: int, device: torch.device) -> list[Tensor]:
    """Weights of which the first one is in no cache any more behind the last one."""
    count = max(2, round(COLD_BYTES / (columns * depth * 2)))
    return [
        torch.randn(columns, depth, device=device, dtype=torch.bfloat16) / depth**0.5
        for _ in range(count)
    ]


def _time(product: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
    """us of a product in a captured graph."""
    for weight in weights[:2]:
        product(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = 5
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays / len(weights)
