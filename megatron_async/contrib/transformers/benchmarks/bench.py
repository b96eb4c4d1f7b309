"""Milliseconds per token of transformers' ``generate``: stock, and with what this package adds.

    python -m megatron_async.contrib.transformers.benchmarks.bench gpt2 --batch 1 4 32 --json FILE

takes a name or a directory; ``--variants baseline captured --trace FOLDER`` chooses variants and
writes profiles.

Each variant is compared with the tokens of stock on the same cache before it is timed; a variant
that differs is reported and not timed. A run without a GPU is refused: on the CPU all variants are
stock, and its figures would say nothing; ``--device cpu`` is a trial of the script itself.
``random:gpt2`` and the like have random weights, for machines without a checkpoint.

``--table`` measures the rows of ``rows.py``, each in a process of its own that is
killed after ``--budget`` seconds, and goes on after one that fails. The file has what was found
from the first row on. ``--sweep`` measures the table of variants likewise, see
``sweep.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_async.contrib.transformers.benchmarks.rows import (
    ROWS,
    line_of,
    run_row,
    run_table,
    seconds_of,
)
from megatron_async.contrib.transformers.benchmarks.sweep import run_sweep

RANDOM: dict[str, dict[str, Any]] = {
    "random:tiny-gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
    "random:tiny-llama-1b": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    },
    "random:tiny-llama-8b": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    },
    "random:gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "random:gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "random:gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "random:llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "random:llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 16384, "rope_theta": 500000.0,
    },
}  # fmt: skip


class Variant(NamedTuple):
    """``custom`` is made when it is needed; ``compiled`` leaves transformers' compilation on."""

    static: bool
    compiled: bool
    custom: Callable[[], Any]


def variants() -> dict[str, Variant]:
    from megatron_async.contrib.transformers import (
        AsyncGenerate,
        alternating_streams,
        async_generate,
        generate_captured,
    )

    def alternating() -> Any:
        return AsyncGenerate(streams=alternating_streams)

    def stock() -> None:
        return None

    return {
        "baseline": Variant(False, False, stock),
        "interleaved": Variant(False, False, lambda: async_generate),
        "static": Variant(True, False, stock),
        "static-interleaved": Variant(True, False, lambda: async_generate),
        "alternating": Variant(False, False, alternating),
        "static-alternating": Variant(True, False, alternating),
        "compiled": Variant(True, True, stock),
        "all": Variant(True, True, lambda: async_generate),
        "all-alternating": Variant(True, True, alternating),
        "captured": Variant(True, True, lambda: generate_captured),
        "captured-uncompiled": Variant(True, False, lambda: generate_captured),
    }


def load(name: str, dtype: torch.dtype, device: str) -> Any:
    import transformers as t

    if name in RANDOM:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # in fp32 the largest would not fit
        try:
            with torch.device(device):
                if "gpt2" in name:
                    model: Any = t.GPT2LMHeadModel(t.GPT2Config(**RANDOM[name]))
                else:
                    model = t.LlamaForCausalLM(t.LlamaConfig(**RANDOM[name]))
        finally:
            torch.set_default_dtype(before)
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


def trace(run: Callable[[], Any], path: Path) -> None:
    """A profile in Chrome's format, which shows the two streams."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def measure(
    model: Any,
    name: str,
    batch: int,
    options: argparse.Namespace,
    references: dict[tuple[int, bool], Any] | None = None,
) -> dict[str, Any]:
    """One line of the table: the median of the runs, in milliseconds per token. ``references`` are
    the tokens of stock for other variants of the model, by batch and whether caches are static."""
    variant = variants()[name]
    run = generation(model, variant, batch, options)
    key, references = (batch, variant.static), {} if references is None else references
    if key not in references:
        stock = Variant(variant.static, False, lambda: None)
        references[key] = generation(model, stock, batch, options)()
    reference = references[key]
    tokens = run()
    result = {"model": options.model, "variant": name, "batch": batch, "dtype": options.dtype}
    same = tokens.shape == reference.shape and torch.equal(tokens, reference)
    if not same and not variant.compiled:
        return {**result, "error": "tokens differ from those of stock on the same cache"}
    run()
    seconds = [seconds_of(run, model.device) for _ in range(options.runs)]
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    said = f"a name or directory, or one of {', '.join(RANDOM)}"
    parser.add_argument("model", nargs="?", help=said)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    said = "all of them; those of --sweep are in sweep.py"
    parser.add_argument("--variants", nargs="+", choices=list(variants()), help=said)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--trace", type=Path, help="directory for a profile of each variant")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    said = "measure the rows of the table, with --json, and no model"
    parser.add_argument("--table", action="store_true", help=said)
    said = "measure the table of variants, with --json, and no model"
    parser.add_argument("--sweep", action="store_true", help=said)
    said = "processes of --sweep that compile side by side (8)"
    parser.add_argument("--jobs", type=int, default=8, help=said)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="these of the table alone")
    parser.add_argument("--row", choices=list(ROWS), help="one row, in this process")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of each row")
    parser.add_argument("--tiny", action="store_true", help="rows of tiny models, for a trial")
    options = parser.parse_args(arguments)
    if (options.table or options.sweep) and (options.json is None or options.model is not None):
        parser.error("--table and --sweep go with --json FILE, and without a model")
    if not (options.table or options.sweep) and options.row is None and options.model is None:
        parser.error("give a model, --table or --sweep")
    return options


def measure_model(options: argparse.Namespace) -> None:
    """All variants of one model, a line each; one that fails is reported."""
    model = load(options.model, getattr(torch, options.dtype), options.device)
    device = options.device_name
    print(f"{options.model}, {options.dtype}, {device}, torch {torch.__version__}")
    results: list[dict[str, Any]] = []
    references: dict[tuple[int, bool], Any] = {}
    for batch in options.batch:
        for name in options.variants or variants():
            try:
                result = measure(model, name, batch, options, references)
            except Exception as error:  # such as memory that is not there
                result = {"model": options.model, "variant": name, "batch": batch}
                result["error"] = f"{type(error).__name__}: {error}"[:500]
            results.append({**result, "device": device, "torch": torch.__version__})
            told = result.get("error") or f"{result['ms_per_token']:.3f} ms/token"
            print(f"batch {batch:>3}  {name:<20} {told}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; 1 if a row of it did not come to its end."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench needs a GPU: on the CPU every variant is stock")
    options.device_name = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    if options.table or options.sweep:
        keep = ("--device", options.device, "--dtype", options.dtype, "--runs", str(options.runs))
        size = ("--tokens", str(options.tokens), "--prompt", str(options.prompt))
        given = [*keep, *size, *["--tiny"] * options.tiny]
        run = run_sweep if options.sweep else run_table
        failed = run(Path(__file__), given, options, lambda line: print(line, flush=True))
        return int(failed > 0)
    if options.row is not None:
        print(line_of(run_row(options.row, options)), flush=True)
    else:
        measure_model(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
