"""Times the attention and batch-invariant kernels on a GPU: ``python scripts/bench_kernels.py``.

Each number is the mean of calls inside a CUDA graph that goes round several copies of the cache or
the weight, so that they come from memory. ``--sweep`` tries other tiles instead.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_async.inference.benchmark.floor import copy_bandwidth
from megatron_async.kernels.attention import paged_decode_triton as attention
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.gemm import batch_invariant_triton as products
from megatron_async.runner.context import DynamicInferenceContext

CALLS = 20
REPLAYS = 10
ROUND_BYTES = 400e6
"""Copies are made up to this size, several times the L2 cache."""
BLOCK_SIZE = 64
DECODE_SHAPES = (
    (32, 32, 8, 128, 812),
    (1, 32, 8, 128, 812),
    (128, 32, 8, 128, 662),
    (32, 16, 8, 128, 812),
    (8, 4, 2, 64, 512),
)
"""Rows, query heads, KV heads, head dimension, context."""
STEP_ROWS = (40, 64, 96, 128, 256)
STEP_HEADS, STEP_KV_HEADS, STEP_HEAD_DIM = 32, 8, 128
STEP_CAPACITY = 131072
PRODUCT_SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096))
"""N, K."""
PRODUCT_ROWS = (1, 32, 128)


def seconds_per_call(call: Callable[[int], object]) -> float:
    """Mean device time of ``call(0)`` to ``call(CALLS - 1)``, captured together."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / (REPLAYS * CALLS)


def copies(byte_count: float) -> int:
    return max(1, min(CALLS, -int(-ROUND_BYTES // byte_count)))


def decode_call(
    rows: int, heads: int, kv_heads: int, head_dim: int, context: int
) -> tuple[Callable[[int], object], float]:
    """A call of decode attention in bfloat16 and the bytes that it must read."""
    byte_count = 4.0 * rows * context * kv_heads * head_dim
    columns = -(-context // BLOCK_SIZE)
    shape = (2, rows * columns + 1, BLOCK_SIZE, kv_heads, head_dim)
    caches = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies(byte_count))
    ]
    order = torch.randperm(rows * columns) + 1
    # Four times as many columns as the context takes: splits beyond it must cost little.
    table = F.pad(order.view(rows, columns), (0, 3 * columns)).cuda()
    lengths = torch.full((rows,), context, device="cuda")
    query = torch.randn(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)

    def call(number: int) -> object:
        keys, values = caches[number % len(caches)]
        return attention.paged_decode_attention_triton(
            query, keys, values, table, lengths, head_dim**-0.5
        )

    return call, byte_count


def lengths_of(rows: int) -> dict[str, list[int]]:
    """Tokens in the cache of each row: all alike, and ragged."""
    draw = random.Random(rows)
    ragged = [int(min(2500, max(40, draw.lognormvariate(6, 0.9)))) for _ in range(rows)]
    return {"even": [384] * rows, "ragged": ragged}


def step_calls(
    lengths: Sequence[int], device: str = "cuda"
) -> tuple[dict[str, Callable[[int], torch.Tensor]], float]:
    """A decode step's attention from the packed projection on, in one kernel and in the three of
    Triton, and the bytes that it must read."""
    byte_count = 4.0 * sum(lengths) * STEP_KV_HEADS * STEP_HEAD_DIM
    rows, needed = len(lengths), [length // BLOCK_SIZE + 1 for length in lengths]
    layers = copies(byte_count)
    context = DynamicInferenceContext(
        params_dtype=torch.bfloat16,
        num_layers=layers,
        kv_channels=STEP_HEAD_DIM,
        num_attention_heads=STEP_KV_HEADS,
        max_sequence_length=STEP_CAPACITY,
        block_count=sum(needed),
        max_requests=rows,
        block_size_tokens=BLOCK_SIZE,
        device=device,
    )
    context.kv_cache.normal_()
    blocks = (torch.randperm(sum(needed), device=device) + 1).split(needed)
    for row, own in enumerate(blocks):
        context.block_table[row, : len(own)] = own
    slots, positions = torch.arange(rows, device=device), torch.tensor(lengths, device=device)
    mapping = context.block_table[slots, positions // BLOCK_SIZE] * BLOCK_SIZE
    context.begin_decode(slots, positions, mapping + positions % BLOCK_SIZE, positions + 1)
    width = (STEP_HEADS + 2 * STEP_KV_HEADS) * STEP_HEAD_DIM
    packed = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    cos_sin = torch.randn(max(lengths) + 1, 2, STEP_HEAD_DIM // 2, device=device)
    scale = STEP_HEAD_DIM**-0.5

    def one(number: int) -> torch.Tensor:
        return context.attend_packed(number % layers, packed, scale, cos_sin, None, None, 0.0)

    def three(number: int) -> torch.Tensor:
        keys, values = context.kv_cache[number % layers]
        query = rope_append.rope_append(
            packed, keys, values, context.slot_mapping, positions, cos_sin
        )
        return context._attend_appended(query, keys, values, scale)

    return {"one": one, "three": three}, byte_count


def bench_steps(bandwidth: float) -> None:
    print(
        "a decode step's attention of Llama-3.1-8B, bf16: rows, lengths: floor, three kernels, one"
    )
    cases = [(rows, *case) for rows in STEP_ROWS for case in lengths_of(rows).items()]
    cases += [(64, "one of 60,000", [60000] + [300] * 63), (64, "4,000", [4000] * 64)]
    for rows, name, lengths in cases:
        calls, byte_count = step_calls(lengths)
        wanted, got = calls["three"](0).double(), calls["one"](0).double()
        error = float((got - wanted).norm() / wanted.norm())
        times = {kind: seconds_per_call(call) * 1e6 for kind, call in calls.items()}
        print(
            f"  {rows}, {name}: {byte_count / bandwidth * 1e6:.1f}, {times['three']:.1f}, "
            f"{times['one']:.1f} us, relative difference {error:.1g}",
            flush=True,
        )
        del calls


def weights_of(columns: int, depth: int) -> list[torch.Tensor]:
    return [
        torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        for _ in range(copies(2.0 * columns * depth))
    ]


def product_seconds(
    product: Callable[[torch.Tensor, torch.Tensor], object], weights: list[torch.Tensor], rows: int
) -> float:
    x = torch.randn(rows, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    return seconds_per_call(lambda number: product(x, weights[number % len(weights)]))


def by_row(x: torch.Tensor, weight: torch.Tensor) -> object:
    return products.matmul_by_row(x, weight.t())


def bench() -> None:
    bandwidth = copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    print("decode attention, bf16, blocks of 64: R Hq Hkv D context")
    for shape in DECODE_SHAPES:
        call, byte_count = decode_call(*shape)
        seconds = seconds_per_call(call)
        rate = byte_count / seconds
        print(
            f"  {shape}: {seconds * 1e6:.1f} us, {rate / 1e9:.0f} GB/s, {rate / bandwidth:.0%}",
            flush=True,
        )
        del call
    bench_steps(bandwidth)
    print("batch-invariant product against torch, bf16: N K M")
    for columns, depth in PRODUCT_SHAPES:
        weights = weights_of(columns, depth)
        for rows in PRODUCT_ROWS:
            ours = product_seconds(by_row, weights, rows)
            theirs = product_seconds(F.linear, weights, rows)
            print(
                f"  {(columns, depth, rows)}: {ours * 1e6:.1f} us, torch {theirs * 1e6:.1f} us, "
                f"ratio {ours / theirs:.2f}",
                flush=True,
            )


def sweep_attention() -> None:
    calls = {shape: decode_call(*shape)[0] for shape in DECODE_SHAPES[:2]}
    choices = itertools.product((128, 256, 512), (8192, 16384), (2, 4, 8), (3, 5, 7))
    results = []
    for choice in choices:
        attention.MIN_SPLIT, attention.TILE_BYTES = choice[:2]
        attention.NUM_WARPS, attention.NUM_STAGES = choice[2:]
        times = [seconds_per_call(call) * 1e6 for call in calls.values()]
        results.append((times, choice))
    print(f"decode attention {list(calls)}: us, MIN_SPLIT TILE_BYTES warps stages")
    for times, choice in sorted(results)[:16]:
        print("  " + " ".join(f"{time:.1f}" for time in times), choice, flush=True)


def sweep_products() -> None:
    tiles = [
        products.Tile(*values)
        for values in (
            (64, 64, 128, 4, 4),
            (64, 64, 128, 4, 3),
            (64, 64, 64, 4, 6),
            (64, 32, 128, 4, 4),
            (64, 32, 128, 4, 6),
            (64, 128, 64, 4, 5),
            (64, 128, 64, 8, 5),
            (128, 64, 64, 8, 5),
            (128, 128, 64, 8, 4),
            (16, 64, 128, 4, 5),
            (32, 64, 128, 4, 4),
        )
    ]
    for columns, depth in PRODUCT_SHAPES:
        weights = weights_of(columns, depth)
        print(f"product {(columns, depth)}: us at M = {PRODUCT_ROWS}, tile M N K warps stages")
        for tile in tiles:
            products.HALF_TILE = products.HALF_TILE_NARROW = tile
            times = [product_seconds(by_row, weights, rows) * 1e6 for rows in PRODUCT_ROWS]
            print("  " + " ".join(f"{time:.1f}" for time in times), tuple(tile), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles and splits")
    if parser.parse_args().sweep:
        sweep_attention()
        sweep_products()
    else:
        bench()
