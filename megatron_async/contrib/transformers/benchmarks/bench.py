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
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_async.contrib.transformers.benchmarks.rows import (
    ROWS,
    line_of,
    run_row,
    run_table,
)
from megatron_async.contrib.transformers.benchmarks.sweep import run_sweep
from megatron_async.contrib.transformers.benchmarks.variants import RANDOM, load, measure, variants


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
