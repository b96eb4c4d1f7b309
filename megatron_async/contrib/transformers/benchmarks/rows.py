"""Five comparisons with transformers, for ``bench.py --table``.

Each is measured in a process of its own, which is killed when its time is over: what it had found
until then is kept, and the next one begins.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_async.contrib.transformers.benchmarks.variants import load, measure, seconds_of

Figures = dict[str, Any]
Keep = Callable[..., None]
"""Adds figures to those of the row, where they survive the process."""

CHECKS = 200
AHEAD = 2
BATCH, PROMPT, NEW, STOCK_NEW, WATCHED_NEW = 32, 32, 8192, 512, 256


class Row(NamedTuple):
    """A comparison. ``most(stock)`` is what ours may be, in ``unit``."""

    name: str
    unit: str
    most: Callable[[float], float]
    measure: Callable[[Any, Keep], None]
    model: str = ""
    variants: tuple[str, str] = ("", "")


def measure_variants(row: Row, options: Any, keep: Keep) -> None:
    """Milliseconds of a token: of stock's variant, then of ours."""
    model = load(options.model, getattr(torch, options.dtype), options.device)
    for whose, name in zip(("stock", "ours"), row.variants, strict=True):
        found = measure(model, name, 1, options)
        if "error" in found:
            raise RuntimeError(f"{name}: {found['error']}")
        keep(**{whose: found["ms_per_token"], f"{whose}_each": found["ms_per_token_each"]})
        keep(**{f"{whose}_variant": name, f"{whose}_equal": found["tokens_equal_stock"]})


def measure_stop_checks(row: Row, options: Any, keep: Keep) -> None:
    """Milliseconds that 200 checks of a batch add to work that the device has in between."""
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    from megatron_async.contrib.transformers import AsyncStoppingCriteriaList
    from megatron_async.contrib.transformers.stopping.streams import streams_of

    device = torch.device(options.device)
    ids = torch.ones(8, 512, dtype=torch.long, device=device)
    tokens, unfinished = ids[:, -1], torch.ones(8, dtype=torch.long, device=device)
    criteria = [MaxLengthCriteria(10**6), EosTokenCriteria(torch.tensor([0], device=device))]
    stock = StoppingCriteriaList(criteria)
    size = 4096 if device.type == "cuda" else 8
    matrix = torch.randn(size, size, device=device, dtype=getattr(torch, options.dtype))

    def work_alone() -> None:
        for _ in range(CHECKS):
            matrix @ matrix

    def checks_of_stock() -> None:
        left = unfinished
        for _ in range(CHECKS):
            matrix @ matrix
            left = left & ~stock(ids, None)
            assert left.max() != 0

    def checks_of_ours() -> None:
        ours = AsyncStoppingCriteriaList(criteria, streams_of(device))
        if ours.streams is None:  # a CPU has stock's
            return checks_of_stock()
        ours.begin(ids)
        left, check = unfinished, None
        for _ in range(CHECKS):
            matrix @ matrix
            if check is not None:  # behind the next work, as where tokens are selected
                ours.streams.join(check.ticket)
                left = check.unfinished if check.unfinished is not None else left
            check = ours.submit(ids, tokens, None, left)
            if ours.outstanding >= AHEAD:
                ours.wait_oldest()
            while ours.oldest_ready():
                assert ours.settle()[1].unfinished.all()
        while ours.outstanding:
            ours.wait_oldest()
            ours.settle()
        return ours.finalize()

    def median(run: Callable[[], None]) -> float:
        each = [seconds_of(run, device) * 1e3 for _ in range(2 + options.runs)][2:]
        return statistics.median(each)

    alone = median(work_alone)
    keep(work_ms=alone)
    for whose, run in (("stock", checks_of_stock), ("ours", checks_of_ours)):
        whole = median(run)
        keep(**{whose: max(whole - alone, 0.0), f"{whose}_with_work": whole})


def measure_batch(row: Row, options: Any, keep: Keep) -> None:
    """Seconds of a batch of long texts: of ours all of them, of stock some tokens, scaled up, which
    is less than all would take: their contexts are shorter."""
    from transformers import GenerationConfig

    from megatron_async.contrib.transformers.engine.build import engine_of
    from megatron_async.contrib.transformers.engine.requests import sampling_params

    model = load(options.model, getattr(torch, options.dtype), options.device)
    batch, new = (4, 24) if options.tiny else (BATCH, NEW)
    stock_new = min(STOCK_NEW, new // 2)
    keep(batch=batch, new_tokens=new, stock_tokens=stock_new)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (batch, PROMPT), generator=generator)
    greedy = GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=new)
    device = torch.device(options.device)

    def stock_seconds(count: int) -> float:
        return seconds_of(
            lambda: model.generate_batch(prompts.tolist(), greedy, max_new_tokens=count), device
        )

    try:  # twice, since each call captures its graphs anew
        few, many = stock_seconds(stock_new // 4), stock_seconds(stock_new)
        keep(stock_seconds=[few, many])
        if many <= few:
            raise ValueError(f"{stock_new} tokens took no longer than a quarter of them")
        keep(stock=(many - few) / (stock_new - stock_new // 4) * new)
    except Exception as error:  # such as kernels that are not there
        keep(stock_error=f"{type(error).__name__}: {error}"[:500])
    if device.type == "cuda":  # what generate_batch has left
        gc.collect()
        torch.cuda.empty_cache()
    with engine_of(model, weights="take", lengths=[PROMPT + new] * batch) as engine:

        def decode(count: int) -> None:
            params = sampling_params(greedy, PROMPT, max_new_tokens=count)
            for request in engine.generate(prompts.tolist(), params):
                assert len(request.generated_tokens) == count

        decode(4)
        keep(ours=seconds_of(lambda: decode(new), device))
        engine.device.start_timeline()
        decode(min(WATCHED_NEW, new))
        spans = sorted((span.start_ns, span.end_ns) for span in engine.device.take_timeline())
        keep(gpu_active=share(spans), watched_tokens=min(WATCHED_NEW, new))


def share(spans: list[tuple[int, int]]) -> float:
    """Return the share of the time from the first start to the last end that some span covers."""
    covered, reached = 0, spans[0][0]
    for start, end in spans:
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered / max(reached - spans[0][0], 1)


def _of_variants(name: str, model: str, most: Callable[[float], float], *variants: str) -> Row:
    return Row(
        name,
        "ms/token",
        most,
        lambda options, keep: measure_variants(ROWS[name], options, keep),
        model,
        (variants[0], variants[1]),
    )


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        _of_variants("gpt2-stopping", "gpt2", lambda stock: stock / 1.1, "baseline", "interleaved"),
        _of_variants("gpt2-captured", "gpt2", lambda stock: 0.6, "compiled", "captured"),
        _of_variants("llama1b-captured", "llama-1b", lambda s: s / 2, "compiled", "captured"),
        Row(
            "stop-checks",
            f"ms of {CHECKS}",
            lambda stock: stock / 4,
            lambda options, keep: measure_stop_checks(ROWS["stop-checks"], options, keep),
        ),
        Row(
            "llama8b-batch",
            f"s of {BATCH} x {NEW:,}",
            lambda stock: 70.0,
            lambda options, keep: measure_batch(ROWS["llama8b-batch"], options, keep),
            "llama-8b",
        ),
    )
}


def run_row(name: str, options: Any) -> Figures:
    """Measure one row in this process, and keep what is found in ``options.json``."""
    row = ROWS[name]
    figures: Figures = {"row": name, "unit": row.unit, "device": options.device_name}
    if row.model:
        options.model = options.model or f"random:{'tiny-' * options.tiny}{row.model}"
        figures["model"] = options.model

    def keep(**found: Any) -> None:
        figures.update(found)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1))

    keep()
    row.measure(options, keep)
    if "stock" in figures:
        keep(most=row.most(figures["stock"]))
    elif name == "llama8b-batch":
        keep(most=row.most(0.0))
    if "ours" in figures and "most" in figures:
        keep(holds=figures["ours"] <= figures["most"])
    return figures


def run_table(script: Path, arguments: list[str], options: Any, told: Callable[[str], None]) -> int:
    """All rows, or those asked for; the number of those that did not come to their end.

    Args:
        script: ``bench.py``, started with ``arguments`` for each row.
    """
    rows, failed = [], 0
    part = options.json.with_suffix(".part")
    for name in options.rows or ROWS:
        part.unlink(missing_ok=True)
        command = [sys.executable, str(script), *arguments, "--row", name, "--json", str(part)]
        started = time.monotonic()
        error = run_child(command, options.budget)
        found = {"row": name, **(json.loads(part.read_text()) if part.exists() else {})}
        found["seconds"] = round(time.monotonic() - started, 1)
        if error is not None:
            failed += 1
            found["error"] = error
        rows.append(found)
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
        told(line_of(found))
    part.unlink(missing_ok=True)
    return failed


def run_child(command: list[str], budget: float) -> str | None:
    """Run a process for at most ``budget`` seconds; why it failed, None if it did not."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            said = process.communicate(timeout=budget)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"its {budget:g} seconds are over"
    if process.returncode == 0:
        return None
    lines = [line for line in said.splitlines() if line.strip()]
    return f"status {process.returncode}: {lines[-1] if lines else 'no message'}"[:500]


def line_of(found: Figures) -> str:
    """One row of the table."""

    def number(name: str) -> str:
        return f"{found[name]:.3f}" if name in found else "-"

    verdict = {None: "-", True: "holds", False: "MISSED"}[found.get("holds")]
    if "error" in found:
        verdict = f"FAILED: {found['error']}"
    active = f", GPU active {found['gpu_active']:.2%}" if "gpu_active" in found else ""
    return (
        f"{found['row']:<18} {found.get('unit', ''):<16} stock {number('stock'):>9}  ours "
        f"{number('ours'):>9}  at most {number('most'):>9}  {verdict}{active}"
    )
