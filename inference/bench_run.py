"""What ``bench`` measures, in order: the start, the workload, the baselines."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_async.engine.build import resolve_device

from .bandwidth import copy_bandwidth
from .bench_baselines import measure_baselines
from .bench_decode_run import DecodeBench
from .bench_engine import decode_config, free_memory, ragged_config
from .bench_guard import Progress
from .bench_load import Load, RaggedLoad
from .bench_ragged_run import RaggedBench
from .bench_report import SCHEMA_VERSION, environment
from .bench_startup import measure_startup
from .subject import Subject, load_subject

Keep = Callable[[dict[str, Any]], None]


def collect(
    args: argparse.Namespace, load: Load | RaggedLoad, command: str, keep: Keep
) -> dict[str, Any]:
    """Measure everything and return the report, plain JSON types, ``complete`` when nothing
    failed. ``keep`` is called with what there is so far whenever there is more."""
    load_model = partial(load_subject, args, longest=load.longest, what=load.what, seed=load.seed)
    device = resolve_device(args.device)
    # A copy takes memory too, which a model may leave no room for.
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    subject = load_model()
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        **environment(device),
        "bandwidth_bytes_per_second": bandwidth,
        "workload": args.workload,
        "shape": subject.name,
        "model": subject.config.to_dict(),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "load": dataclasses.asdict(load),
        "build_seconds": subject.build_seconds,
        "fused_decode_off": subject.wrapper.fused_decode_off,
        "decode_coverage": subject.wrapper.decode_coverage().to_dict(),
        "startup": None,
        "results": [],
        "baselines": [],
        "complete": False,
    }
    progress = Progress(lambda: keep(report))
    if args.startup:
        progress.describe("start")
        try:
            config = _startup_config(subject, args, load)
            report["startup"] = measure_startup(subject, config, load_model)
        except Exception as error:
            progress.failed("--startup", error, lower="--batch-sizes or --max-requests")
        free_memory()
        progress.done("start measured")
    bench: DecodeBench | RaggedBench
    if isinstance(load, Load):
        bench = DecodeBench(subject, args, load, bandwidth)
    else:
        bench = RaggedBench(subject, args, load)
    report["results"] = bench.results
    progress.expect(bench.measurements)
    bench.run(progress)
    # Engines may have found a reason that the model alone does not give.
    report["fused_decode_off"] = subject.wrapper.fused_decode_off
    report["decode_coverage"] = subject.wrapper.decode_coverage().to_dict()
    if args.baseline:
        batches = bench.requests()
        config, dtype = subject.config, subject.dtype
        del subject, bench  # their memory is the baseline's now
        free_memory()
        measure_baselines(args, batches, config, device, dtype, report["baselines"], progress)
    progress.close()
    report["complete"] = not progress.failures
    keep(report)
    return report


def _startup_config(subject: Subject, args: argparse.Namespace, load: Load | RaggedLoad) -> Any:
    """Of an engine at the largest batch and depth asked for, with all row buckets."""
    depth = max(args.depths)
    if isinstance(load, Load):
        return decode_config(subject, max(args.batch_sizes), depth, load, all_buckets=True)
    return ragged_config(subject, depth, load)
