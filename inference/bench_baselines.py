"""Measures the baselines of ``bench`` one after the other; what cannot be measured says why."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from megatron_async.models.config import ModelConfig

from .bench_baseline import NoBaselineError, Requests, TransformersBaseline
from .bench_baseline_cb import ContinuousBatchingBaseline
from .bench_guard import Progress

BASELINES: dict[str, Any] = {
    "transformers": TransformersBaseline,
    "transformers-cb": ContinuousBatchingBaseline,
}


def measure_baselines(
    args: argparse.Namespace,
    batches: list[Requests],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    found: list[dict[str, Any]],
    progress: Progress,
) -> None:
    """Append to ``found`` what each baseline makes of each batch, and why it does not."""
    progress.expect(len(args.baseline))
    for name in args.baseline:
        progress.describe(f"baseline {name}")
        results: list[dict[str, Any]] = []
        skipped: list[str] = []
        found.append({"name": name, "results": results, "skipped": skipped})
        try:
            baseline = BASELINES[name](config, device, dtype)
        except NoBaselineError as reason:
            skipped.append(str(reason))
            progress.done(f"baseline {name}: {reason}")
            continue
        for requests in batches:
            if not requests:
                skipped.append("there are no lengths to decode: no run of ours succeeded")
                continue
            try:
                results += baseline.measure(requests, args.max_requests or len(requests))
            except NoBaselineError as reason:
                skipped.append(f"batch {len(requests)}: {reason}")
        skipped += getattr(baseline, "reasons", [])
        baseline.close()
        progress.keep()
        progress.done(f"baseline {name}: {len(results)} measured, {len(skipped)} not")
