"""Time attention of prefill chunks on a GPU: our kernels and other libraries', of Llama-8B's heads.

    python scripts/bench_prefill_attention.py [--block-size N]

For each shape a line for each way: milliseconds (the median of some calls), TFLOP/s of the causal
products, and milliseconds of the first call, which compiles or makes plans. "Triton" and "CUDA"
attend to a KV cache; libraries get contiguous keys and values where they are installed. ``error``
is the largest difference from the Triton kernel.
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

from megatron_async.kernels.attention import prefill_attention
from megatron_async.kernels.attention.paged_prefill_triton import paged_mixed_attention_triton

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
SHAPES = ((2, 4096, 0), (1, 8192, 0), (1, 8192, 24576), (1, 512, 4096), (16, 512, 0))
"""Chunks, their length, and the tokens in front of each."""
LIMIT_MS = 120
"""So long a way is timed for a shape, behind its first call."""
AT_ONCE = 5
"""Calls that are timed together, so that what the host does is hidden."""
Way = tuple[str, Callable[[], Any]]


class Inputs(NamedTuple):
    """A step's chunks over a cache of scattered blocks, and keys and values one after another."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    chunks: Tensor
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
    chunks = [(n, n * length, length, start) for n in range(count)]
    query = torch.randn(count * length, HEADS, HEAD_DIM, **like)
    gathered = [each[table].flatten(1, 2)[:, :whole].flatten(0, 1) for each in cache]
    places = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    return Inputs(
        query, *cache, table, torch.tensor(chunks, dtype=torch.int32, device="cuda"),
        torch.empty_like(query), torch.stack(gathered), places * length, places * whole,
    )  # fmt: skip


def ours(x: Inputs) -> Iterator[Way]:
    """Kernels over the cache: the one that an engine takes, and Triton's."""
    given = (x.query, x.keys, x.values, x.table, x.chunks, SCALE, x.out)

    def attended(call: Callable[..., None]) -> Tensor:
        call(*given)
        return x.out

    yield "Triton", partial(attended, paged_mixed_attention_triton)
    if prefill_attention.attends(x.query, x.keys):
        yield "CUDA", partial(attended, prefill_attention.prefill_attention)


def others(x: Inputs) -> Iterator[Way]:
    """cuDNN's attention of whole sequences, and libraries' of variable lengths, the last query at
    the last key."""
    _, _, length, start = x.chunks[0].tolist()
    longest = [length, start + length]
    given = (x.query, *x.whole, x.query_starts, x.key_starts, *longest)
    if not start:
        dense = [each.unflatten(0, (-1, length)).transpose(1, 2) for each in (x.query, *x.whole)]
        call = partial(torch.ops.aten._scaled_dot_product_cudnn_attention, *dense, None, False)
        yield "cuDNN", lambda: call(0.0, True, False, scale=SCALE)[0].transpose(1, 2).flatten(0, 1)
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
        for _ in range(AT_ONCE):
            call()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / AT_ONCE)
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
        result = result[0] if isinstance(result, tuple) else result
        if expected is None:
            expected = result.float()
        error = (result.float() - expected).abs().max().item()
        line = f"  {name}: {took:.3f}, {flops / took * 1e-9:,.0f}, {first:.1f}, {error:.1e}"
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
