"""Time attention of prefill chunks on a GPU: our kernels and other libraries', of Llama-8B's heads.

    python scripts/bench_prefill_attention.py [--block-size N]

For each shape a line for each way: milliseconds (the median of some calls), TFLOP/s of the causal
products, and milliseconds of the first call, which compiles or makes plans. "Triton" and "cuDNN"
attend to a KV cache, each beside its parts; other libraries get contiguous keys and values where
they are installed. ``error`` is the largest difference from the Triton kernel.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_prefill, whole_prefill
from megatron_async.step.packet import PlacedChunk

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
SHAPES = ((2, 4096, 0), (1, 8192, 0), (1, 8192, 24576), (1, 512, 4096), (16, 512, 0))
"""Chunks, their length, and the tokens in front of each."""
LIMIT_MS = 120
"""So long a way is timed for a shape, behind its first call."""
Way = tuple[str, Callable[[], Any]]


class Inputs(NamedTuple):
    """A step's chunks over a cache of scattered blocks, and keys and values one after another."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    chunks: tuple[PlacedChunk, ...]
    chunk_table: Tensor
    out: Tensor
    whole: Tensor
    """Keys and values ``[2, tokens, Hkv, D]`` of all sequences."""
    query_starts: Tensor
    key_starts: Tensor


def inputs_of(count: int, length: int, start: int, block_size: int) -> Inputs:
    """Random ones."""
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    whole, columns = start + length, -(-(start + length) // block_size)
    cache = torch.randn(2, count * columns, block_size, KV_HEADS, HEAD_DIM, **like)
    table = torch.randperm(count * columns, device="cuda").view(count, columns)
    chunks = tuple(PlacedChunk(n, n * length, length, start) for n in range(count))
    query = torch.randn(count * length, HEADS, HEAD_DIM, **like)
    gathered = [
        whole_prefill.gather_blocks(*cache, table, [n], whole, whole, torch.bfloat16)[:, 0]
        for n in range(count)
    ]
    places = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    return Inputs(
        query, *cache, table, chunks, torch.tensor(chunks, dtype=torch.int32, device="cuda"),
        torch.empty_like(query), torch.cat(gathered, dim=1), places * length, places * whole,
    )  # fmt: skip


def ours(x: Inputs) -> Iterator[Way]:
    """The Triton kernel, cuDNN over the cache, and the parts of that."""
    cache = (x.keys, x.values, x.table)

    def triton_kernel() -> Tensor:
        paged_prefill.paged_mixed_attention(x.query, *cache, x.chunk_table, SCALE, x.out)
        return x.out

    def library() -> Tensor:
        out = whole_prefill.whole_mixed_attention(x.query, *cache, x.chunks, SCALE, None)
        if out is None:
            raise RuntimeError("refused")
        return out

    yield "Triton", triton_kernel
    yield "cuDNN over the cache", library
    run = whole_prefill.runs_of(x.chunks)[0]
    chunk, slots, grid = run[0], [each.slot for each in run], whole_prefill.GRID
    before = chunk.start // grid * grid
    side = whole_prefill.size_of_square(chunk.start - before + chunk.length)
    end = chunk.start + chunk.length
    gather = partial(whole_prefill.gather_blocks, *cache, slots, before + side, end, torch.bfloat16)
    parts = f"  of {len(run)} together:"
    yield f"{parts} gather", gather
    keys, values = gather()
    query = x.query.new_zeros(len(run), side, HEADS, HEAD_DIM)
    part = whole_prefill.attend_part
    square = (query, keys[:, before:], values[:, before:], SCALE)
    yield f"{parts} square", partial(part, *square, causal=True, wants_mass=before > 0)
    out, mass = part(*square, causal=True)
    if before:
        at = whole_prefill.pieces(before, whole_prefill.KEY_BITS)[0]
        given = (query, keys[:, at], values[:, at], SCALE)
        yield f"{parts} first piece", partial(part, *given)
        other = (out[0].clone(), mass[0].clone())
        yield f"{parts} merge", partial(whole_prefill.merge, out[0], mass[0], *other)
    yield f"{parts} copy, where others are in the step", partial(torch.clone, out)


def others(x: Inputs) -> Iterator[Way]:
    """Libraries' attention of variable lengths, the last query at the last key."""
    longest = [x.chunks[0].length, x.chunks[0].start + x.chunks[0].length]
    given = (x.query, *x.whole, x.query_starts, x.key_starts, *longest)
    varlen = found("torch.nn.attention.varlen", "varlen_attn")
    if varlen is not None:
        if "enable_gqa" in inspect.signature(varlen).parameters:
            options = {"scale": SCALE, "window_size": (-1, 0), "enable_gqa": True}
            yield "torch varlen_attn", partial(varlen, *given, **options)
        else:  # before it took groups
            repeated = x.whole.repeat_interleave(HEADS // KV_HEADS, dim=2)
            call = partial(varlen, x.query, *repeated, *given[3:], scale=SCALE, is_causal=True)
            yield "torch varlen_attn, repeated heads", call
    for module in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        call = found(module, "flash_attn_varlen_func")
        if call is not None:
            named = dict(zip(
                ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), given[:5], strict=True
            ))  # fmt: skip
            if module != "flash_attn.cute":
                named |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
            yield module, partial(call, **named, softmax_scale=SCALE, causal=True)
    _planned.clear()
    wrapper = found("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")
    if wrapper is not None:
        for backend in ("fa2", "fa3"):
            yield f"flashinfer {backend}", lambda b=backend: flashinfer(wrapper, b, x)()


def flashinfer(wrapper: Any, backend: str, x: Inputs) -> Callable[[], Any]:
    """A planned call, planned once for these inputs."""
    if backend not in _planned:
        space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        planned = wrapper(space, "NHD", backend=backend)
        planned.plan(
            x.query_starts, x.key_starts, HEADS, KV_HEADS, HEAD_DIM, causal=True,
            sm_scale=SCALE, q_data_type=torch.bfloat16,
        )  # fmt: skip
        _planned[backend] = partial(planned.run, x.query, *x.whole)
    return _planned[backend]


_planned: dict[str, Callable[[], Any]] = {}
"""Calls of flashinfer for the inputs that are timed now, by backend."""


def found(module: str, name: str) -> Any:
    """What a module has under a name, or None."""
    try:
        return getattr(import_module(module), name, None)
    except Exception:  # whatever a library's import fails with
        return None


def milliseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """The first call by the clock, and the median of those behind it on the device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = (time.perf_counter() - started) * 1e3
    took: list[float] = []
    until = time.perf_counter() + LIMIT_MS * 1e-3
    while len(took) < 3 or (len(took) < 20 and time.perf_counter() < until):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return first, statistics.median(took)


def bench(shape: tuple[int, int, int], block_size: int) -> None:
    """The lines of a shape."""
    count, length, start = shape
    x = inputs_of(*shape, block_size)
    flops = 4 * HEADS * HEAD_DIM * count * (length * start + length * (length + 1) / 2)
    print(f"{count} x {length:,} behind {start:,}: ms, TFLOP/s, first call ms, error", flush=True)
    expected = None
    for name, call in (*ours(x), *others(x)):
        try:
            first, took = milliseconds(call)
            result = call()
        except Exception as error:  # whatever a library refuses with
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        line = f"  {name}: {took:.3f}"
        if not name.startswith(" "):
            result = result[0] if isinstance(result, tuple) else result
            if expected is None:
                expected = result.float()
            error = (result.float() - expected).abs().max().item()
            line += f", {flops / took * 1e-9:,.0f}, {first:.1f}, {error:.1e}"
        else:
            line += f", first {first:.1f}"
        print(line, flush=True)


def main() -> None:
    """Run the script."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a KV block")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}")  # fmt: skip
    started = time.perf_counter()
    for shape in SHAPES:
        bench(shape, args.block_size)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
