"""The table of docs/transformers.md: what each part of ``integrations/transformers`` is worth.

    python scripts/bench_transformers_table.py --json table.json
    python scripts/bench_transformers_table.py --rows gpt2 checks --seconds 60

Random weights, bfloat16, on one GPU. Each row is measured beside stock in the same run; a row that
fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_transformers import generation, load, seconds_of, variants

Row = dict[str, Any]


def ms_per_token(
    model: Any, name: str, options: argparse.Namespace, prepare: Callable[[Any], Any] | None = None
) -> Row:
    """Median of the runs of a variant, after two that warm up."""
    run = generation(model, variants()[name], 1, options)
    if prepare is not None:
        prepare(model)
    started = time.perf_counter()
    first = run()
    run()
    new = first.shape[1] - options.prompt
    each = [seconds_of(run) / new * 1e3 for _ in range(options.runs)]
    took = time.perf_counter() - started - sum(each) * new / 1e3
    return {"ms_per_token": statistics.median(each), "each": each, "warm_up_s": took}


def compare(model: Any, names: list[str], options: argparse.Namespace) -> Row:
    """Variants of ``generate`` at batch 1."""
    found: Row = {}
    for name in names:
        found[name] = ms_per_token(model, name, options)
        print(f"    {name:<20} {found[name]['ms_per_token']:.3f} ms/token", flush=True)
    return found


def gpt2(options: argparse.Namespace) -> Row:
    """GPT-2, batch 1: stock and asynchronous stopping, on both caches, and captured."""
    model = load("random:gpt2", torch.bfloat16, "cuda")
    found = compare(model, ["baseline", "interleaved", "static", "captured", "compiled"], options)
    found["async_speedup"] = (
        found["baseline"]["ms_per_token"] / found["interleaved"]["ms_per_token"]
    )
    return found


def llama1b(options: argparse.Namespace) -> Row:
    """Llama-3.2-1B's shape, batch 1: compiled and captured."""
    model = load("random:llama-1b", torch.bfloat16, "cuda")
    found = compare(model, ["captured", "compiled"], options)
    found["captured_share_of_compiled"] = (
        found["captured"]["ms_per_token"] / found["compiled"]["ms_per_token"]
    )
    return found


def checks(options: argparse.Namespace, count: int = 200, batch: int = 8) -> Row:
    """Stop checks alone: the host's time for ``count`` of them, synchronous and asynchronous, while
    the device has work of its own."""
    from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    from megatron_async.integrations.transformers.stopping import AsyncStoppingCriteriaList
    from megatron_async.integrations.transformers.streams import streams_of

    device = torch.device("cuda")
    ids = torch.randint(5, 1000, (batch, 512), device=device)
    tokens, unfinished = ids[:, -1].clone(), torch.ones(batch, dtype=torch.long, device=device)
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    made = [EosTokenCriteria(eos_token_id=[1, 2]), MaxLengthCriteria(max_length=4096)]

    def decode() -> None:
        work @ work

    def synchronous() -> None:
        criteria = StoppingCriteriaList(made)
        for _ in range(count):
            decode()
            bool(criteria(ids, None).all())

    def asynchronous() -> None:
        streams = streams_of(device)
        assert streams is not None
        criteria = AsyncStoppingCriteriaList(made, streams)
        criteria.begin(ids)
        try:
            for _ in range(count):
                decode()
                check = criteria.submit(ids, tokens, None, unfinished)
                streams.join(check.ticket)
                criteria.known_at_launch(ids.shape[1])
                while criteria.oldest_ready():
                    criteria.settle()
        finally:
            criteria.finalize()

    def alone() -> None:
        for _ in range(count):
            decode()

    found: Row = {"checks": count, "batch": batch}
    for name, run in (("work_ms", alone), ("sync_ms", synchronous), ("async_ms", asynchronous)):
        run()
        found[name] = statistics.median(seconds_of(run) for _ in range(options.runs)) * 1e3
    found["sync_checks_ms"] = found["sync_ms"] - found["work_ms"]
    found["async_checks_ms"] = found["async_ms"] - found["work_ms"]
    return found


def engine(options: argparse.Namespace) -> Row:
    """Llama-3.1-8B's shape, batch 32, ``--long`` new tokens through the engine, and some of
    ``generate_batch``."""
    import transformers as t

    from inference.benchmark.launches import marked_launches
    from megatron_async.integrations.transformers.engine import engine_of
    from megatron_async.integrations.transformers.requests import sampling_params

    config = t.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=16384,
        rope_theta=500000.0, dtype="bfloat16",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = t.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 1000, (32, 128), generator=generator).tolist()
    found: Row = {"batch": 32, "new_tokens": options.long}
    if options.stock_tokens:
        try:
            asked = t.GenerationConfig(
                max_new_tokens=options.stock_tokens, do_sample=False, eos_token_id=-1
            )
            started = time.perf_counter()
            model.generate_batch(prompts, generation_config=asked)
            whole = time.perf_counter() - started
            asked.max_new_tokens //= 2
            started = time.perf_counter()
            model.generate_batch(prompts, generation_config=asked)
            half = time.perf_counter() - started
            new = options.stock_tokens - options.stock_tokens // 2
            found["generate_batch_ms_per_step"] = (whole - half) / new * 1e3
            found["generate_batch_s"] = [whole, half]
        except Exception as error:  # its interface changes from release to release
            found["generate_batch_error"] = f"{type(error).__name__}: {error}"
        gc.collect()
        torch.cuda.empty_cache()
        print("    " + json.dumps(found), flush=True)
    asked = t.GenerationConfig(max_new_tokens=options.long, do_sample=False)
    params = [sampling_params(asked, len(ids)) for ids in prompts]
    started = time.perf_counter()
    lengths = [len(ids) + options.long for ids in prompts]
    with engine_of(model, weights="take", lengths=lengths) as made:
        found["start_s"] = time.perf_counter() - started
        with marked_launches(made.device, after_prefill=True) as figures:
            torch.cuda.synchronize()
            started = time.perf_counter()
            requests = made.generate(prompts, params)
            found["engine_s"] = time.perf_counter() - started
        found["events"] = figures()
        found["tokens"] = sum(len(r.generated_tokens) for r in requests)
        found["engine_ms_per_step"] = found["engine_s"] / options.long * 1e3
    return found


ROWS = {"gpt2": gpt2, "checks": checks, "llama1b": llama1b, "engine": engine}


def main() -> None:
    """Measure the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--long", type=int, default=8192, help="new tokens of the row engine")
    parser.add_argument("--stock-tokens", type=int, default=128, help="of generate_batch; 0: none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.sample = False
    if not torch.cuda.is_available():
        raise SystemExit("bench_transformers_table needs a GPU")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.rows:
        print(name, flush=True)
        try:
            found[name] = ROWS[name](options)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        print("  " + json.dumps(found[name]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
