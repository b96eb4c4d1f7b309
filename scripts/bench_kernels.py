"""Time kernels on a GPU: attention and the batch-invariant GEMM, or whole steps of other sources.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --e4m3
    python scripts/bench_kernels.py --e4m3 --e4m3-inputs
    python scripts/bench_kernels.py --e4m3-cache
    python scripts/bench_kernels.py --sinks
    git archive HEAD~1 megatron_async/kernels | tar -x -C FOLDER
    python scripts/bench_kernels.py --compare FOLDER/megatron_async/kernels --shape llama8b

Each number is the mean of calls in a CUDA graph that goes round several copies of cache or weight,
so that they come from memory. ``--compare`` times decode steps of a few layers with the CUDA
sources of a folder and with these, in turns, since clocks and power change. The same Python calls
both, so kernels must have the same names and parameters. ``error`` is the relative difference of
the logits: 0 where sums are taken in the same order; above 2e-2 the exit status is 1.

``--e4m3`` times skinny GEMMs with e4m3 weights, a scale for each row and for 128 columns, beside
those with bfloat16 weights, and ``--tries`` other tile configs for each. ``error`` is against the
reference. ``--e4m3-inputs`` adds those whose inputs are e4m3 too, for 32 rows and more, the kernels
that quantize, and cuBLAS's products of e4m3.

``--e4m3-cache`` times a decode step's attention over an e4m3 KV cache beside one in bfloat16, and
``--sinks`` that of GPT-OSS's layers with their sinks and windows.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.gemm import scaled_e4m3
from megatron_async.kernels.gemm.e4m3_inputs import quantize_rows
from megatron_async.kernels.gemm.invariant import products_triton as gemm
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm, scaled_product, statistics_of
from megatron_async.kernels.gemm.tile_choice import find
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    GemmProblem,
    TileConfig,
)
from megatron_async.kernels.gemm.untuned.ranking import short_ranking
from megatron_async.kernels.gemm.untuned.search import balanced
from megatron_async.kernels.norm.norm_inputs import norm_rows
from megatron_async.kernels.shared_memory import block_limit
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.fused.blocks.gemms import LEAST_E4M3_ROWS
from megatron_async.models.fused.timed_step import ERROR_LIMIT, Rig, Step, in_turns
from megatron_async.models.quantized import inputs
from megatron_async.runner.memory.attention_metadata import AttentionMetadata
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache

MOST_COPIES, ROUND_BYTES = 20, 400e6
"""Copies are made up to this size, several times the L2 cache."""
BLOCK_SIZE, CAPACITY = 64, 131072
Heads = tuple[int, int, int]
"""Query heads, KV heads, head dimension."""
LLAMA_8B, QWEN_600M, TINY, GPT_OSS = (32, 8, 128), (16, 8, 128), (4, 2, 64), (64, 8, 64)
DECODE_CASES = [(32, LLAMA_8B, 812), (1, LLAMA_8B, 812), (128, LLAMA_8B, 662)]
DECODE_CASES += [(32, QWEN_600M, 812), (8, TINY, 512)]
"""Rows, heads, context."""
WINDOWS, WINDOW_CONTEXT = (1, 2, 3, 4, 5), 640
STEP_ROWS = (40, 64, 96, 128, 256)
SKINNY_GEMMS = {
    "Llama-8B": [
        (6144, 4096, RMS_NORM, STORE), (4096, 4096, NO_NORM, ADD),
        (28672, 4096, RMS_NORM, SILU_GATE), (4096, 14336, NO_NORM, ADD),
    ],
    "Qwen3-0.6B": [
        (4096, 1024, RMS_NORM, STORE), (1024, 2048, NO_NORM, ADD),
        (6144, 1024, RMS_NORM, SILU_GATE), (1024, 3072, NO_NORM, ADD),
    ],
}  # fmt: skip
SKINNY_ROWS = (1, 8, 32, 64)
GEMM_SHAPES, GEMM_ROWS = ((28672, 4096), (4096, 14336), (6144, 4096)), (1, 32, 128)


def microseconds(call: Callable[[int], object]) -> float:
    """Mean device time of ``call(0)``, ``call(1)`` and so on, captured together."""
    from triton.testing import do_bench_cudagraph

    numbers = itertools.count()
    return 1e3 * float(do_bench_cudagraph(lambda: call(next(numbers))))


def copies(byte_count: float) -> int:
    return max(1, min(MOST_COPIES, -int(-ROUND_BYTES // byte_count)))


def lengths_of(rows: int) -> dict[str, list[int]]:
    """Tokens in the cache of each row: all alike, and ragged."""
    draw = random.Random(rows)
    ragged = [int(min(2500, max(40, draw.lognormvariate(6, 0.9)))) for _ in range(rows)]
    return {"even": [384] * rows, "ragged": ragged}


def attention_calls(
    lengths: Sequence[int],
    shape: Heads = LLAMA_8B,
    device: str = "cuda",
    window: int = 1,
    kept: torch.dtype | None = None,
    limits: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Callable[[int], torch.Tensor]], float]:
    """A decode step's attention in bfloat16 and the bytes that it must read: from the packed
    projection on in ``one`` kernel and in the ``three`` of Triton, and Triton's ``attention``.

    Each row brings ``window`` tokens behind its ``lengths``. The cache is in dtype ``kept``.
    ``limits`` are the layer's, see ``kernels/attention``.
    """
    heads, kv_heads, head_dim = shape
    limits = dict(limits or {})
    tokens_read = sum(min(length, limits.get("window", length)) for length in lengths)
    byte_count = 2.0 * (2 if kept is None else kept.itemsize) * tokens_read * kv_heads * head_dim
    rows, needed = len(lengths), [(length + window - 1) // BLOCK_SIZE + 1 for length in lengths]
    layers, scale = copies(byte_count), head_dim**-0.5
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, kept=kept
    )
    sizes = CacheSizes.of(
        spec.token_bytes, max_sequence_length=CAPACITY, block_count=sum(needed), max_requests=rows,
        block_size_tokens=BLOCK_SIZE, num_speculative_tokens=window - 1,
    )  # fmt: skip
    context = ForwardBatch(KVCache(sizes, spec, device))
    by = 1 if context.scales is None else 2.0**5
    for each in context.kv_cache:
        each.copy_(by * torch.randn(each.shape, dtype=torch.bfloat16, device=device))
    if context.scales is not None:
        context.scales.fill_(1 / by)
    blocks = (torch.randperm(sum(needed), device=device) + 1).split(needed)
    for row, own in enumerate(blocks):
        context.block_table[row, : len(own)] = own
    slots = torch.arange(rows, device=device).repeat_interleave(window)
    firsts, offsets = torch.tensor(lengths, device=device), torch.arange(window, device=device)
    positions = (firsts[:, None] + offsets).flatten()
    mapping = context.block_table[slots, positions // BLOCK_SIZE] * BLOCK_SIZE
    mapping += positions % BLOCK_SIZE
    tokens, width = rows * window, (heads + 2 * kv_heads) * head_dim
    metadata = AttentionMetadata(positions, slots, mapping, tokens, positions + 1, window=window)
    context.begin(metadata)
    cached = CacheAttention(context.kv_cache, context.block_table, batch_invariant=False)
    packed = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    query = packed[:, : heads * head_dim].reshape(tokens, heads, head_dim)
    cos_sin = torch.randn(max(lengths) + window, 2, head_dim // 2, device=device)

    def one(number: int) -> torch.Tensor:
        return context.attend_packed(
            number % layers, packed, scale, cos_sin, None, None, 0.0, **limits
        )

    def three(number: int) -> torch.Tensor:
        cache, slots = context.kv_cache[number % layers], context.slot_mapping
        scales = None if context.scales is None else context.scales[number % layers]
        rotated = rope_append.rope_append(packed, *cache, slots, positions, cos_sin, scales=scales)
        return cached.attend_appended(metadata, rotated, *cache, scale, limits, scales)

    def attention(number: int) -> torch.Tensor:
        cache = context.kv_cache[number % layers]
        return cached.attend_appended(metadata, query, *cache, scale, limits)

    return {"one": one, "three": three, "attention": attention}, byte_count


def gemm_us(call: Callable[[torch.Tensor, torch.Tensor], object], n: int, k: int, m: int) -> float:
    weights = torch.randn(copies(2.0 * n * k), n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return microseconds(lambda number: call(x, weights[number % len(weights)]))


def by_row(x: torch.Tensor, weight: torch.Tensor) -> object:
    return gemm.matmul_by_row(x, weight.t())


class SkinnyCall:
    """A skinny GEMM as a decode step calls it; call i takes weight i of several."""

    def __init__(self, problem: GemmProblem, config: TileConfig, device: torch.device) -> None:
        rows, n, k, norm, epilogue, columns, e4m3_inputs = problem
        assert norm is not None and epilogue is not None
        self.problem, self.config = problem, config
        self.byte_count = float(n * k * (1 if columns else 2))
        if columns:
            self.byte_count += 4 * n * (k // columns)
        self.kernel = SkinnyGemm(
            n, k, rows, norm, epilogue, RMS_NORM, config, device, scale_columns=columns,
            e4m3_inputs=e4m3_inputs,
        )  # fmt: skip
        count = copies(self.byte_count)
        self.x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        self.weights = torch.randn(count, n, k, device=device, dtype=torch.bfloat16)
        self.scales: torch.Tensor | None = None
        if columns:
            self.weights = self.weights.to(torch.float8_e4m3fn)
            self.scales = torch.rand(count, n, k // columns, device=device)
        width = n // 2 if epilogue == SILU_GATE else n
        self.out = torch.zeros(rows, width, device=device, dtype=torch.bfloat16)
        self._given: dict[str, object] = {}
        self._inputs = self.x
        if e4m3_inputs:
            self._inputs, scale = inputs.quantize_inputs(self.x, 1)
            self._given["input_scale"] = scale
            self.x = self._inputs.float() * scale
        if norm == RMS_NORM:
            unit = torch.ones(k, device=device, dtype=torch.bfloat16)
            self._given = {
                "norm": (unit, None, 1e-5),
                "statistics": statistics_of(self.x, norm, 64),
            }
        if epilogue == ADD:
            tiles = n // self.kernel.statistic_rows
            self._given |= {
                "residual": torch.zeros_like(self.out),
                "scaled": (torch.ones_like(self.out[0]), torch.empty_like(self.out)),
                "statistics_out": torch.empty(rows, tiles, 2, device=device),
            }

    def __call__(self, number: int) -> torch.Tensor:
        """Launch it, and return where the output goes."""
        i = number % len(self.weights)
        scale = None if self.scales is None else self.scales[i]
        self.kernel(self._inputs, self.weights[i], self.out, weight_scale=scale, **self._given)
        return self.out

    def error(self) -> float:
        """The relative error of the first call."""
        x, weight = self.x.float(), self.weights[0]
        if self.problem.norm == RMS_NORM:
            x = F.rms_norm(x, x.shape[1:], eps=1e-5)
        y = x @ weight.float().t() if self.scales is None else None
        if self.scales is not None:
            y = scaled_product(x, weight, self.scales[0])
        assert y is not None
        if self.problem.epilogue == SILU_GATE:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return float((self(0).float() - y).norm() / y.norm())


def formats(k: int, rows: int, norm: int, by_token: bool) -> dict[str, tuple[int, int, bool]]:
    """By what is printed: the norm in the GEMM, columns that share a scale, inputs in e4m3."""
    found = {"bf16": (norm, 0, False), "e4m3 by row": (norm, k, False)}
    found["e4m3 by 128"] = norm, 128, False
    if by_token and rows >= LEAST_E4M3_ROWS:
        found["e4m3 by row and token"] = NO_NORM, k, True
    return found


def bench_products(n: int, k: int, rows: int, label: str) -> None:
    """What is around a product of e4m3: cuBLAS's with scales by row and with one, and the kernels
    that quantize rows and normed rows."""
    weights = torch.randn(copies(n * k), n, k, device="cuda", dtype=torch.bfloat16).to(E4M3)
    w_scale = torch.rand(n, 1, device="cuda")
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    numbers, scale = inputs.quantize_inputs(x, 1)
    unit = torch.ones(k, device="cuda", dtype=torch.bfloat16)

    def product(unit: torch.Tensor | None) -> Callable[[int], object]:
        return lambda i: scaled_e4m3.multiply_by_library(
            numbers, scale, weights[i % len(weights)], w_scale, torch.bfloat16, unit=unit
        )

    def quantize(i: int) -> object:
        return quantize_rows(x, numbers, scale, None)

    def norm(i: int) -> object:
        return norm_rows(
            x, unit, None, 1e-5, numbers=numbers, scale=scale, static=None, center=False
        )

    one = torch.ones((), device="cuda")
    calls = {"cuBLAS by row": product(None), "cuBLAS, one scale, then scales": product(one)}
    calls |= {"quantize": quantize, "norm and quantize": norm}
    for name, call in calls.items():
        print(f"{label}, {name}: {microseconds(call):.2f} us", flush=True)


def bench_e4m3(tries: int, by_token: bool) -> float:
    """Skinny GEMMs with weights in bfloat16 and in e4m3, and with inputs in e4m3 ``by_token``; the
    largest error."""
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth, worst = copy_bandwidth(device), 0.0
    sizes = {"sm_count": cuda.sm_count(device.index), "limit": block_limit(device)}
    tma = cuda.has_wgmma(device.index)
    print("skinny GEMMs: model, (N K) rows, weights: us, TB/s, share of copying, error, config")
    for model, shapes in SKINNY_GEMMS.items():
        for (n, k, norm, epilogue), rows in itertools.product(shapes, SKINNY_ROWS):
            if by_token:
                bench_products(n, k, rows, f"  {model}, ({n} {k}) {rows}")
            for name, (normed, *format_) in formats(k, rows, norm, by_token).items():
                problem = GemmProblem(rows, n, k, normed, epilogue, *format_)
                label = f"  {model}, ({n} {k}) {rows}, {name}"
                entry = find(problem, tma, **sizes)
                if entry is None:
                    print(f"{label}: no kernel", flush=True)
                    continue
                tried = balanced(problem, tries, tma=tma, **sizes)
                if problem.e4m3_inputs:
                    tried = short_ranking(problem, tries, tma=tma, **sizes)
                for config in dict.fromkeys([entry.config, *tried]):
                    call = SkinnyCall(problem, config, device)
                    error, us = call.error(), microseconds(call)
                    worst = max(worst, error)
                    rate = call.byte_count / us * 1e6
                    shown = f"{us:.2f} us, {rate / 1e12:.2f}, {rate / bandwidth:.0%}, {error:.1g}"
                    print(f"{label}: {shown}, {tuple(map(int, config))}", flush=True)
    return worst


def bench() -> None:
    """Triton's attention, the kernels of a decode step's attention, the batch-invariant GEMM."""
    bandwidth = copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    print("Triton's decode attention, bf16, blocks of 64: R (Hq Hkv D) context")
    for rows, shape, context in DECODE_CASES:
        calls, byte_count = attention_calls([context - 1] * rows, shape)
        us = microseconds(calls["attention"])
        share = byte_count / us * 1e6 / bandwidth
        print(f"  {rows} {shape} {context}: {us:.1f} us, {share:.0%} of copying", flush=True)
    print("a decode step's attention, Llama-3.1-8B, bf16: rows, lengths: floor, three kernels, one")
    cases = [(rows, *case) for rows in STEP_ROWS for case in lengths_of(rows).items()]
    cases += [(64, "one of 60,000", [60000] + [300] * 63), (64, "4,000", [4000] * 64)]
    for rows, name, lengths in cases:
        calls, byte_count = attention_calls(lengths)
        wanted, got = calls["three"](0).double(), calls["one"](0).double()
        error = float((got - wanted).norm() / wanted.norm())
        times = [byte_count / bandwidth * 1e6, *(microseconds(calls[k]) for k in ("three", "one"))]
        shown = ", ".join(f"{time:.1f}" for time in times)
        print(f"  {rows}, {name}: {shown} us, relative difference {error:.1g}", flush=True)
    print(f"windows over {WINDOW_CONTEXT} tokens: (Hq Hkv D) rows, tokens: floor, three, one")
    for shape, rows in itertools.product((LLAMA_8B, QWEN_600M), (1, 8, 32, 64)):
        for window in WINDOWS:
            calls, byte_count = attention_calls([WINDOW_CONTEXT] * rows, shape, window=window)
            us = [byte_count / bandwidth * 1e6, *(microseconds(calls[k]) for k in ("three", "one"))]
            print(f"  {shape} {rows}, {window}: " + ", ".join(f"{each:.1f}" for each in us))
    print("batch-invariant GEMM against torch, bf16: (N K) M")
    for size, rows in itertools.product(GEMM_SHAPES, GEMM_ROWS):
        ours, theirs = (gemm_us(call, *size, rows) for call in (by_row, F.linear))
        print(f"  {size} {rows}: {ours:.1f} us, torch {theirs:.1f} us, ratio {ours / theirs:.2f}")


def bench_e4m3_cache() -> float:
    """The largest relative difference between one kernel and three."""
    bandwidth = copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    print("attention over bf16 and over e4m3: (Hq Hkv D) rows, context, window: floor, three, one")
    worst = 0.0
    shapes = (LLAMA_8B, QWEN_600M)
    cases = itertools.product(shapes, (1, 8, 32, 64), (1000, 8000), (1, 4))
    for shape, rows, context, window in cases:
        shown = []
        for kept in (None, E4M3):
            calls, byte_count = attention_calls([context] * rows, shape, "cuda", window, kept)
            wanted, got = calls["three"](0).double(), calls["one"](0).double()
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            us = [byte_count / bandwidth * 1e6, *(microseconds(calls[k]) for k in ("three", "one"))]
            shown.append(", ".join(f"{each:.1f}" for each in us))
            del calls
        print(f"  {shape} {rows}, {context}, {window}: {'; '.join(shown)} us", flush=True)
    print(f"largest relative difference {worst:.1g}")
    return worst


def bench_sinks(device: str = "cuda") -> float:
    """The largest relative difference between one kernel and three."""
    bandwidth = copy_bandwidth(torch.device(device, torch.cuda.current_device()))
    print("GPT-OSS's layers, bf16: rows, context, tokens, attention window: floor, three, one")
    sinks, worst = torch.linspace(-2, 8, GPT_OSS[0], device=device).bfloat16(), 0.0
    cases = itertools.product((1, 8, 32, 64), (1000, 8000), (1, 4), (128, None))
    for rows, context, window, sees in cases:
        limits = {"sinks": sinks} if sees is None else {"sinks": sinks, "window": sees}
        lengths = [context] * rows
        calls, byte_count = attention_calls(lengths, GPT_OSS, device, window, limits=limits)
        wanted, got = calls["three"](0).double(), calls["one"](0).double()
        worst = max(worst, float((got - wanted).norm() / wanted.norm()))
        us = [byte_count / bandwidth * 1e6, *(microseconds(calls[k]) for k in ("three", "one"))]
        shown = ", ".join(f"{each:.1f}" for each in us)
        print(f"  {rows}, {context}, {window}, {sees or 'none'}: {shown} us", flush=True)
        del calls
    print(f"largest relative difference {worst:.1g}")
    return worst


def capture(rig: Rig, sources: Path) -> Step:
    """A step with the kernels of ``sources``."""
    own, cuda.SOURCES = cuda.SOURCES, sources
    cuda._kernel.cache_clear()
    try:
        rig.compile({})
        return rig.capture({})
    finally:
        cuda.SOURCES = own
        cuda._kernel.cache_clear()


def compare(
    rig: Rig, sources: Sequence[Path], rounds: int, label: str
) -> tuple[list[float], float]:
    """Median microseconds of a step with each of the ``sources``, and the last one's error."""
    steps = [capture(rig, folder) for folder in sources]
    bar = tqdm(range(rounds + 1), label, file=sys.stderr, leave=False, disable=None)
    return in_turns(rig.mean_us, steps, bar), steps[-1].error


def main() -> int:
    """Run the script. Returns 1 if logits differ."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--e4m3", action="store_true", help="skinny GEMMs with e4m3 weights")
    add("--e4m3-inputs", action="store_true", help="with --e4m3: inputs in e4m3 too")
    add("--e4m3-cache", action="store_true", help="attention over an e4m3 KV cache")
    add("--sinks", action="store_true", help="attention of GPT-OSS's layers")
    add("--tries", type=int, default=0, metavar="N", help="other tile configs with --e4m3")
    add("--compare", type=Path, metavar="FOLDER", help="other CUDA sources")
    add("--shape", default="llama8b", choices=sorted(SHAPES))
    add("--rows", default="32,1", metavar="R,...")
    add("--context", default="384", metavar="N,...", help="tokens of each row")
    add("--layers", type=int, default=6)
    add("--rounds", type=int, default=15)
    add("--replays", type=int, default=20, help="steps of each mean")
    args = parser.parse_args()
    if args.e4m3:
        return int(not bench_e4m3(args.tries, args.e4m3_inputs) < ERROR_LIMIT)
    if args.e4m3_cache:
        return int(not bench_e4m3_cache() < ERROR_LIMIT)
    if args.sinks:
        return int(not bench_sinks() < ERROR_LIMIT)
    if args.compare is None:
        bench()
        return 0
    if not (args.compare / "gemm" / "skinny_gemm_mma.cu").is_file():
        parser.error(f"{args.compare} holds no gemm/skinny_gemm_mma.cu; name a folder kernels")
    wrong = False
    print("shape, rows, context: us with the others -> us with these, ratio, error")
    for rows, context in itertools.product(args.rows.split(","), args.context.split(",")):
        label = f"{args.shape}, {rows}, {context}"
        options = {"layers": args.layers, "context": int(context), "replays": args.replays}
        rig = Rig(SHAPES[args.shape], int(rows), **options, device=torch.device("cuda", 0))
        (before, after), error = compare(rig, [args.compare, cuda.SOURCES], args.rounds, label)
        times = f"{before:.1f} -> {after:.1f}, {after / before:.4f}"
        print(f"{label}: {times}, {error:.2g}", flush=True)
        wrong |= not error < ERROR_LIMIT
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
