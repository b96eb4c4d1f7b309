"""Time prefill with weights and activations in bfloat16 and in e4m3.

    python scripts/bench_prefill.py [--model random:llama8b] [--prompts N] [--tokens N]
    python scripts/bench_prefill.py --profile [--prompts 1 --tokens 32768]
    python scripts/bench_prefill.py --products
    python scripts/bench_prefill.py --passes [--tokens 65536]

The first takes all prompts into an engine at once, of random tokens, and says how long it takes
until each has its first token, the median of rounds behind one that is not counted, for each of
``--formats``. With ``--profile`` one more round, of bfloat16 if no format is given, runs under
``torch.profiler``: its kernels by the time that they take in all, and how long the GPU had none.
The third times the linear layers of Llama-8B alone: cuBLAS's products of bfloat16 and of e4m3, with
sums in fp32 and with fast ones, those of the Triton kernel with scales by row and by 128 columns,
and what quantizes their inputs. The last times what is between them, in bfloat16, as programs of
several sizes: milliseconds and TB/s.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.device.kernel_profiler import DeviceKernel, KernelProfiler
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.gemm import e4m3_inputs, scaled_e4m3
from megatron_async.kernels.norm import swiglu
from megatron_async.kernels.norm.add_norm import add_norm
from megatron_async.kernels.norm.norm_inputs import add_norm_inputs
from megatron_async.kernels.norm.swiglu_inputs import swiglu_inputs

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "weights": {"quantization": "fp8"},
    "activations": {"quantization": "fp8", "quantize_activations": True},
}
LINEARS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
"""Rows and columns of Llama-8B's weights."""
CALLS = 20
MOST_KERNELS = 25
"""Lines of a profile."""


def prefill_seconds(args: argparse.Namespace, options: dict[str, Any]) -> float:
    """Until each of ``args.prompts`` prompts has its first token, the median."""
    config = EngineConfig(
        device=args.device,
        max_requests=args.prompts,
        max_sequence_length=args.tokens + 8,
        prefill_chunk_tokens=args.tokens,
        max_tokens=args.prompts * (args.tokens + 1),
        enable_prefix_caching=False,
        num_cuda_graphs=1,
        **options,
    )
    chance = random.Random(0)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=1, termination_id=-1)
    took = []
    with DynamicInferenceEngine.from_pretrained(args.model, config) as engine:
        vocabulary = engine.model.network.vocab_size

        def generate() -> float:
            prompts = [
                [chance.randrange(vocabulary) for _ in range(args.tokens)]
                for _ in range(args.prompts)
            ]
            started = time.perf_counter()
            engine.generate(prompts, params)
            return time.perf_counter() - started

        took += [generate() for _ in range(1 + args.rounds)]
        if args.profile:
            profiler = KernelProfiler()
            generate()
            torch.cuda.synchronize()
            print_kernels(profiler.take())
    return statistics.median(took[1:])


def print_kernels(kernels: list[DeviceKernel]) -> None:
    """Kernels by their time in all, and the time between them."""
    by_name: dict[str, list[int]] = {}
    idle, until = 0, None
    for name, start, end in sorted(kernels, key=lambda kernel: kernel.start_ns):
        by_name.setdefault(name, []).append(end - start)
        idle += 0 if until is None else max(0, start - until)
        until = end if until is None else max(until, end)
    busy = sum(map(sum, by_name.values()))
    print(f"  {busy * 1e-6:.1f} ms in {len(kernels)} kernels, {idle * 1e-6:.1f} ms between them")
    print("  share      ms  count  mean us  kernel")
    for name, took in sorted(by_name.items(), key=lambda each: -sum(each[1]))[:MOST_KERNELS]:
        total, count = sum(took), len(took)
        print(
            f"  {total / busy:5.1%} {total * 1e-6:7.1f} {count:6} {total * 1e-3 / count:8.1f}  "
            f"{name[:120]}"
        )


def bench_prefill(args: argparse.Namespace) -> None:
    """A line for each format."""
    count = args.prompts * args.tokens
    print(f"{args.model}: {args.prompts} prompts of {args.tokens:,} tokens")
    for name in args.formats:
        seconds = prefill_seconds(args, FORMATS[name])
        print(f"  {name}: {seconds:.3f} s, {count / seconds:,.0f} tokens/s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def milliseconds(call: Callable[[], object]) -> float:
    """The mean of some calls, behind a few others."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def products_of(x: Tensor, wide: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed for inputs ``[rows, k]`` and a weight ``[n, k]`` in bfloat16."""
    calls: dict[str, Callable[[], object]] = {"bf16": partial(torch.mm, x, wide.t())}
    for by, groups in (("by row", 1), ("by 128", wide.shape[1] // 128)):
        weight, weight_scale = e4m3_inputs.quantize_inputs(wide, groups)
        numbers, scale = e4m3_inputs.quantize_inputs(x, groups)
        calls[f"quantize {by}"] = partial(e4m3_inputs.quantize_inputs, x, groups)
        given = (numbers, scale, weight, weight_scale, torch.bfloat16)
        calls[f"Triton {by}"] = partial(scaled_e4m3.multiply, *given, tile=scaled_e4m3.MANY_ROWS)
        for sums, fast in (("", False), (", fast sums", True)) if groups == 1 else ():
            calls[f"cuBLAS {by}{sums}"] = partial(
                torch._scaled_mm, numbers, weight.t(), scale, weight_scale.t(),
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip
    return calls


def bench_products(rows: int) -> None:
    """Milliseconds of each linear layer and format, and TFLOP/s."""
    print(f"{rows} rows: ms (TFLOP/s)")
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for name, (n, k) in LINEARS.items():
        calls = products_of(torch.randn(rows, k, **like), torch.randn(n, k, **like))
        for label, call in calls.items():
            took = milliseconds(call)
            speed = "" if "quantize" in label else f" ({2e-9 * rows * n * k / took:,.0f})"
            print(f"  {name}, {label}: {took:.3f}{speed}", flush=True)
    hidden, gate = torch.randn(rows, 4096, **like), torch.randn(rows, 28672, **like)
    normed = partial(add_norm_inputs, hidden, hidden, hidden[0], None, 1e-5, groups=1)
    print(f"  addition, norm and quantization of 4096 columns: {milliseconds(normed):.3f}")
    print(f"  SwiGLU and quantization: {milliseconds(partial(swiglu_inputs, gate, 1)):.3f}")


def bench_passes(rows: int) -> None:
    """Lines of each pass over the tokens of Llama-8B between its linear layers."""
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, gate = torch.randn(rows, 4096, **like), torch.randn(rows, 28672, **like)

    def say(name: str, call: Callable[[], object], elements: int) -> None:
        took = milliseconds(call)
        print(f"  {name}: {took:.3f} ({2e-9 * rows * elements / took:.2f})", flush=True)

    print(f"{rows:,} rows: ms (TB/s)")
    say("a copy of 28672 columns", gate.clone, 2 * 28672)
    say("addition and norm", partial(add_norm, hidden, hidden, hidden[0], None, 1e-5), 4 * 4096)
    for block, warps in ((1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8)):
        swiglu.BLOCK, swiglu.WARPS = block, warps
        say(f"SwiGLU, {block} columns, {warps} warps", partial(swiglu.swiglu, gate), 3 * 14336)
    packed, places = torch.randn(rows, 6144, **like), torch.arange(rows, device="cuda")
    cache = torch.empty(2, -(-rows // 64), 64, 8, 128, **like)
    given = (packed, *cache, places, places, torch.rand(rows, 2, 64, device="cuda"))
    for elements in (128, 256, 512):
        rope_append.PER_WARP = elements
        warps = 8 * 64 // elements
        call = partial(rope_append.rope_append, *given)
        say(f"rotation and append, {warps} warps", call, 2 * 6144)


def main() -> None:
    """Run the script."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", default="random:llama8b", help="as of megatron-async serve")
    add("--device", help="default: a GPU where there is one")
    add("--prompts", type=int, default=16)
    add("--tokens", type=int, default=4096, help="of each prompt, or rows of layers alone")
    add("--rounds", type=int, default=5)
    add("--formats", nargs="+", choices=list(FORMATS), help="default: all; bf16 with --profile")
    add("--profile", action="store_true", help="one more round, kernel by kernel, on a GPU")
    add("--products", action="store_true", help="linear layers alone, on a GPU")
    add("--passes", action="store_true", help="what is between them alone, on a GPU")
    args = parser.parse_args()
    args.formats = args.formats or (["bf16"] if args.profile else list(FORMATS))
    if args.products:
        bench_products(args.tokens)
    elif args.passes:
        bench_passes(args.tokens)
    else:
        bench_prefill(args)


if __name__ == "__main__":
    main()
