"""Time kernels on a GPU: attention and the batch-invariant GEMM, or whole steps of other sources.

    python scripts/bench_kernels.py
    git archive HEAD~1 megatron_async/kernels | tar -x -C FOLDER
    python scripts/bench_kernels.py --compare FOLDER/megatron_async/kernels --shape llama8b

Each number is the mean of calls in a CUDA graph that goes round several copies of cache or weight,
so that they come from memory. ``--compare`` times decode steps of a few layers with the CUDA
sources of a folder and with these, in turns, since clocks and power change. The same Python calls
both, so kernels must have the same names and parameters. ``error`` is the relative difference of
the logits: 0 where sums are taken in the same order; above 2e-2 the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.gemm import batch_invariant_triton as gemm
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.fused.timed_step import ERROR_LIMIT, Rig, Step, in_turns
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
LLAMA_8B, QWEN_600M, TINY = (32, 8, 128), (16, 8, 128), (4, 2, 64)
DECODE_CASES = [(32, LLAMA_8B, 812), (1, LLAMA_8B, 812), (128, LLAMA_8B, 662)]
DECODE_CASES += [(32, QWEN_600M, 812), (8, TINY, 512)]
"""Rows, heads, context."""
WINDOWS, WINDOW_CONTEXT = (1, 2, 3, 4, 5), 640
STEP_ROWS = (40, 64, 96, 128, 256)
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
    lengths: Sequence[int], shape: Heads = LLAMA_8B, device: str = "cuda", window: int = 1
) -> tuple[dict[str, Callable[[int], torch.Tensor]], float]:
    """A decode step's attention in bfloat16 and the bytes that it must read: from the packed
    projection on in ``one`` kernel and in the ``three`` of Triton, and Triton's ``attention``.

    Each row brings ``window`` tokens behind its ``lengths``.
    """
    heads, kv_heads, head_dim = shape
    byte_count = 4.0 * sum(lengths) * kv_heads * head_dim
    rows, needed = len(lengths), [(length + window - 1) // BLOCK_SIZE + 1 for length in lengths]
    layers, scale = copies(byte_count), head_dim**-0.5
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    sizes = CacheSizes.of(
        spec.token_bytes, max_sequence_length=CAPACITY, block_count=sum(needed), max_requests=rows,
        block_size_tokens=BLOCK_SIZE, num_speculative_tokens=window - 1,
    )  # fmt: skip
    context = ForwardBatch(KVCache(sizes, spec, device))
    context.kv_cache.normal_()
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
        return context.attend_packed(number % layers, packed, scale, cos_sin, None, None, 0.0)

    def three(number: int) -> torch.Tensor:
        cache, slots = context.kv_cache[number % layers], context.slot_mapping
        rotated = rope_append.rope_append(packed, *cache, slots, positions, cos_sin)
        return cached.attend_appended(metadata, rotated, *cache, scale, {})

    def attention(number: int) -> torch.Tensor:
        cache = context.kv_cache[number % layers]
        return cached.attend_appended(metadata, query, *cache, scale, {})

    return {"one": one, "three": three, "attention": attention}, byte_count


def gemm_us(call: Callable[[torch.Tensor, torch.Tensor], object], n: int, k: int, m: int) -> float:
    weights = torch.randn(copies(2.0 * n * k), n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return microseconds(lambda number: call(x, weights[number % len(weights)]))


def by_row(x: torch.Tensor, weight: torch.Tensor) -> object:
    return gemm.matmul_by_row(x, weight.t())


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
    add("--compare", type=Path, metavar="FOLDER", help="other CUDA sources")
    add("--shape", default="llama8b", choices=sorted(SHAPES))
    add("--rows", default="32,1", metavar="R,...")
    add("--context", default="384", metavar="N,...", help="tokens of each row")
    add("--layers", type=int, default=6)
    add("--rounds", type=int, default=15)
    add("--replays", type=int, default=20, help="steps of each mean")
    args = parser.parse_args()
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
