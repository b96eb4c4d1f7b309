"""What ``bench`` measures, in order: the start, the workload, the baselines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_async import megatron_compat as compat
from megatron_async.benchmark.decode_workload import DecodeWorkload
from megatron_async.benchmark.drafts import all_drafts, described
from megatron_async.benchmark.measuring.baselines import measure_baselines
from megatron_async.benchmark.measuring.engines import (
    decode_config,
    free_memory,
    measure_startup,
    ragged_config,
)
from megatron_async.benchmark.measuring.loads import Load, RaggedLoad
from megatron_async.benchmark.measuring.one_rank import ONE_RANK, measure_one_rank
from megatron_async.benchmark.model import BenchmarkModel, load_benchmark_model
from megatron_async.benchmark.progress import Progress
from megatron_async.benchmark.ragged_workload import RaggedWorkload
from megatron_async.benchmark.workloads import Workload
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import resolve_device
from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.version import __version__

SCHEMA_VERSION = 2

Keep = Callable[[dict[str, Any]], None]


def collect(
    args: argparse.Namespace, load: Load | RaggedLoad, command: str, keep: Keep
) -> dict[str, Any]:
    """Measure everything and return the report, plain JSON types, ``complete`` when nothing
    failed. ``keep`` is called with what there is so far whenever there is more."""
    sizes: dict[str, Any] = {"longest": load.longest, "what": load.what, "seed": load.seed}
    load_model = partial(load_benchmark_model, args, **sizes)
    device = resolve_device(args.device)
    # A copy takes memory too, which a model may leave no room for.
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    # So do several ranks, which one rank must not meet.
    alone = [measure_one_rank(command)] if ONE_RANK in (args.baseline or ()) else []
    model = load_model()
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        **environment(device),
        "bandwidth_bytes_per_second": bandwidth,
        "workload": args.workload,
        "shape": model.name,
        "model": model.config.to_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": model.kv_cache_dtype,
        "load": dataclasses.asdict(load),
        "drafts": described(args),
        "build_seconds": model.build_seconds,
        **coverage(model),
        "startup": None,
        "results": [],
        "baselines": alone,
        "complete": False,
    }
    progress = Progress(lambda: keep(report))
    if args.startup:
        progress.bar.set_description("start")
        try:
            largest = _full_config(model, args, load)
            # A process leads one group of ranks.
            again = load_model if model.group is None else None
            report["startup"] = measure_startup(model, largest, again)
        except Exception as error:
            progress.failed("--startup", error, lower="--batch-sizes or --max-requests")
        free_memory()
        progress.done("start measured")
    workload: Workload
    if isinstance(load, Load):
        workload = DecodeWorkload(model, args, progress, load=load, bandwidth=bandwidth)
    else:
        workload = RaggedWorkload(model, args, progress, load=load)
    report["results"] = workload.results
    progress.bar.total += workload.measurements
    workload.run()
    # Engines may have found a reason that the model alone does not give.
    report |= coverage(model)
    if model.group is not None:
        report["ranks"] = str(model.group.layout)
        model.group.close()
    others = [name for name in args.baseline or () if name != ONE_RANK]
    if others:
        batches = workload.batches()
        config, dtype = dataclasses.replace(model.config, mtp_num_layers=0), model.dtype
        del model, workload  # their memory is the baseline's now
        free_memory()
        found = report["baselines"]
        measure_baselines(args, others, batches, config, device, dtype, found, progress)
    progress.bar.close()
    report["complete"] = not progress.failures
    keep(report)
    return report


def _full_config(
    model: BenchmarkModel, args: argparse.Namespace, load: Load | RaggedLoad
) -> EngineConfig:
    """Return the configuration of an engine at the largest batch and depth asked for, with all row
    buckets."""
    depth, drafts = max(args.depths), all_drafts(args)[-1]
    if isinstance(load, Load):
        return decode_config(model, max(args.batch_sizes), depth, load, drafts, all_buckets=True)
    return ragged_config(model, depth, load, drafts)


def coverage(model: BenchmarkModel) -> dict[str, Any]:
    """Which blocks of a decode step are fused, and why not all."""
    network = model.network
    covered = network.decode_coverage().to_dict()
    return {"fused_decode_off": network.fused_decode_off, "decode_coverage": covered}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and the device's name."""
    versions = {"megatron-async": __version__, "python": platform.python_version()}
    versions["megatron-core"] = compat.installed().version
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": str(device), "device_name": name, "versions": versions}
