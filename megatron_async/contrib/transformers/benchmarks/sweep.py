"""The table of variants, for ``bench.py --sweep``: models, batches and variants.

Most of the time goes to compilers, so each model and batch is run once first, all side by side,
which fills their caches on disk. Then each is timed alone. A process that fails, or whose time is
over, keeps what it has found, and the others go on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_async.contrib.transformers.benchmarks.rows import run_child

MODELS = ("random:gpt2", "random:gpt2-medium", "random:gpt2-large", "random:llama-1b")
TINY = ("random:tiny-gpt2", "random:tiny-llama-1b")
VARIANTS = ("baseline", "interleaved", "alternating", "static", "compiled", "all", "captured")
PREPARED = ("compiled", "all", "all-alternating", "captured")


def run_sweep(script: Path, arguments: list[str], options: Any, told: Callable[[str], None]) -> int:
    """Time all; the number of processes that did not come to their end.

    Args:
        script: ``bench.py``, started with ``arguments`` for each model and batch.
    """
    each = [
        (model, batch) for model in (TINY if options.tiny else MODELS) for batch in options.batch
    ]
    began, variants = time.monotonic(), options.variants or VARIANTS
    prepared = [name for name in variants if name in PREPARED]

    def prepare(case: tuple[str, int]) -> str | None:
        asked = ["--variants", *prepared, "--runs", "1"]
        return run_child(
            [sys.executable, str(script), *arguments, *_of(case), *asked], options.budget
        )

    if prepared:
        with ThreadPoolExecutor(options.jobs) as pool:
            for case, error in zip(each, pool.map(prepare, each), strict=True):
                if error is not None:
                    told(f"{case[0]}, batch {case[1]}, was not prepared: {error}")
        told(f"compiled in {time.monotonic() - began:.0f} s")
    results: list[dict[str, Any]] = []
    failed, part = 0, options.json.with_suffix(".part")
    for case in each:
        part.unlink(missing_ok=True)
        asked = ["--variants", *variants, "--json", str(part)]
        if options.trace is not None:
            asked += ["--trace", str(options.trace / case[0].removeprefix("random:"))]
        error = run_child(
            [sys.executable, str(script), *arguments, *_of(case), *asked], options.budget
        )
        found = json.loads(part.read_text()) if part.exists() else []
        if error is not None:
            failed += 1
            found.append({"model": case[0], "batch": case[1], "variant": "-", "error": error})
        results += found
        options.json.write_text(json.dumps(results, indent=1))
        told(line_of(case, found))
    part.unlink(missing_ok=True)
    return failed


def _of(case: tuple[str, int]) -> list[str]:
    return [case[0], "--batch", str(case[1])]


def line_of(case: tuple[str, int], found: list[dict[str, Any]]) -> str:
    """Milliseconds per token of one model and batch, and what is the fastest beside baseline."""
    figures = {row["variant"]: row["ms_per_token"] for row in found if "ms_per_token" in row}
    parts = [f"{name} {figure:.3f}" for name, figure in figures.items()]
    parts += [f"{row['variant']}: {row['error']}" for row in found if "error" in row]
    if "baseline" in figures:
        best = min(figures, key=figures.__getitem__)
        parts.append(f"{figures['baseline'] / figures[best]:.2f} times with {best}")
    return f"{case[0].removeprefix('random:')}, batch {case[1]}: {', '.join(parts)}"
