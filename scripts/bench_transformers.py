"""Milliseconds per token of transformers' ``generate``: stock, and with what this package adds.

    python scripts/bench_transformers.py gpt2 --batch 1 4 32 --json results.json
    python scripts/bench_transformers.py /path/to/model --variants baseline captured --trace traces

Each variant is compared with the tokens of stock on the same cache before it is timed; a variant
that differs is reported and not timed. A run without a GPU is refused: on the CPU all variants are
stock, and its figures would say nothing. ``random:gpt2`` and the like have random weights, for
machines without a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

RANDOM = {
    "random:gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "random:gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "random:gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "random:llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Variant(NamedTuple):
    """``custom`` is made when it is needed; ``compiled`` leaves transformers' compilation on."""

    static: bool
    compiled: bool
    custom: Callable[[], Any]


def variants() -> dict[str, Variant]:
    from megatron_async.integrations.transformers import async_generate, generate_captured

    def stock() -> None:
        return None

    return {
        "baseline": Variant(False, False, stock),
        "interleaved": Variant(False, False, lambda: async_generate),
        "static": Variant(True, False, stock),
        "static-interleaved": Variant(True, False, lambda: async_generate),
        "compiled": Variant(True, True, stock),
        "all": Variant(True, True, lambda: async_generate),
        "captured": Variant(True, False, lambda: generate_captured),
    }


def load(name: str, dtype: torch.dtype, device: str) -> Any:
    import transformers as t

    if name in RANDOM:
        torch.manual_seed(0)
        with torch.device(device):
            if "gpt2" in name:
                model: Any = t.GPT2LMHeadModel(t.GPT2Config(**RANDOM[name]))
            else:
                model = t.LlamaForCausalLM(t.LlamaConfig(**RANDOM[name]))
        return model.to(dtype).eval()
    return t.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()


def generation(
    model: Any, variant: Variant, batch: int, options: argparse.Namespace
) -> Callable[[], Any]:
    """A call of ``generate`` whose rows end by length: the last id is the end id, made impossible
    by no processor, so its check runs for every token."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary - 1, (batch, options.prompt), generator=generator)
    given = {
        "input_ids": ids.to(model.device),
        "attention_mask": torch.ones_like(ids).to(model.device),
        "max_new_tokens": options.tokens,
        "do_sample": options.sample,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": 0,
        "disable_compile": not variant.compiled,
        "custom_generate": variant.custom(),
    }
    if variant.static:
        given["cache_implementation"] = "static"

    def run() -> Any:
        torch.manual_seed(0)
        return model.generate(**given)

    return run


def seconds_of(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def trace(run: Callable[[], Any], path: Path) -> None:
    """A profile in Chrome's format, which shows the two streams."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def measure(model: Any, name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table: the median of the runs, in milliseconds per token."""
    variant = variants()[name]
    run = generation(model, variant, batch, options)
    reference = generation(model, variant._replace(compiled=False, custom=lambda: None), batch,
                           options)()  # fmt: skip
    tokens = run()
    result = {"model": options.model, "variant": name, "batch": batch, "dtype": options.dtype}
    same = tokens.shape == reference.shape and torch.equal(tokens, reference)
    if not same and not variant.compiled:
        return {**result, "error": "tokens differ from those of stock on the same cache"}
    run()
    seconds = [seconds_of(run) for _ in range(options.runs)]
    new = tokens.shape[1] - options.prompt
    if options.trace is not None:
        trace(run, options.trace / f"{name}-{batch}.json")
    return {
        **result,
        "tokens": new,
        "ms_per_token": statistics.median(seconds) / new * 1e3,
        "ms_per_token_each": [s / new * 1e3 for s in seconds],
        "tokens_equal_stock": same,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help=f"a name or directory, or one of {', '.join(RANDOM)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=list(variants()), default=list(variants()))
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--trace", type=Path, help="directory for a profile of each variant")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench_transformers needs a GPU: on the CPU every variant is stock")
    model = load(options.model, getattr(torch, options.dtype), "cuda")
    device = torch.cuda.get_device_name()
    print(f"{options.model}, {options.dtype}, {device}, torch {torch.__version__}")
    results = []
    for batch in options.batch:
        for name in options.variants:
            result = measure(model, name, batch, options)
            results.append({**result, "device": device, "torch": torch.__version__})
            told = result.get("error") or f"{result['ms_per_token']:.3f} ms/token"
            print(f"batch {batch:>3}  {name:<20} {told}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
