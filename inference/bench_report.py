"""What ``bench`` found: plain JSON, and a table for people."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from megatron_async.version import __version__

from .bench_engine import Load, Round, Subject
from .bench_timeline import percentile
from .shapes import BANDWIDTH_BYTES_PER_SECOND, floor_ms
from .table import format_table

SCHEMA_VERSION = 1

_HEADER = (
    "batch",
    "depth",
    "ms/step",
    "p50",
    "p99",
    "tokens/s",
    "host-ms",
    "vs-serial",
    "gap-us",
    "in-graph",
    "kernels-active",
    "kernels",
    "floor-ms",
    "of-floor",
    "start-s",
)


def figures(
    subject: Subject,
    load: Load,
    batch_size: int,
    depth: int,
    rounds: Sequence[Round],
    *,
    startup_seconds: float,
    timeline: dict[str, float] | None,
) -> dict[str, Any]:
    """One row of the report; times in milliseconds unless their name says otherwise."""
    steps = [ns * 1e-6 for one in rounds for ns in one.step_ns]
    hosts = [ns * 1e-6 for one in rounds for ns in one.host_ns]
    mean = statistics.fmean(steps)
    floor = None
    if subject.device.type == "cuda":
        floor = floor_ms(
            subject.config,
            subject.dtype.itemsize,
            batch_size=batch_size,
            prompt_tokens=load.prompt_tokens,
            new_tokens=load.new_tokens,
        )
    return {
        "shape": subject.name,
        "batch": batch_size,
        "depth": depth,
        "rounds": len(rounds),
        "steps": len(steps),
        "step_ms_mean": mean,
        "step_ms_p50": statistics.median(steps),
        "step_ms_p99": percentile(steps, 0.99),
        "round_step_ms": [statistics.fmean(one.step_ns) * 1e-6 for one in rounds],
        "tokens_per_second": 1e3 * batch_size / mean,
        "host_ms_mean": statistics.fmean(hosts),
        "host_ms_p50": statistics.median(hosts),
        "host_ms_p99": percentile(hosts, 0.99),
        "speedup_over_serial": None,
        "floor_ms": floor,
        "floor_share": None if floor is None else floor / mean,
        "startup_seconds": startup_seconds,
        "timeline": timeline,
    }


def compare_with_serial(results: list[dict[str, Any]]) -> None:
    """Fill in how many times faster than depth 0 each row is, where depth 0 was measured."""
    serial = {row["batch"]: row["step_ms_mean"] for row in results if row["depth"] == 0}
    for row in results:
        if row["batch"] in serial:
            row["speedup_over_serial"] = serial[row["batch"]] / row["step_ms_mean"]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and the device's name."""
    versions = {"megatron-async": __version__, "python": platform.python_version()}
    for name in ("torch", "megatron-core", "triton", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": str(device), "device_name": name, "versions": versions}


def as_table(report: dict[str, Any]) -> str:
    """The report for people: a line on what was measured, a table, and the baseline below it."""
    load = report["load"]
    lines = [
        f"{report['shape']}, {report['dtype']}, {report['device_name']}, "
        f"prompt {load['prompt_tokens']}, {load['new_tokens']} new tokens"
    ]
    if load["host_work_us"]:
        lines[0] += f", {load['host_work_us']:g} us of host work in each commit"
    if load["stall_us"]:
        lines[0] += f", a stall of {load['stall_us']:g} us every {load['stall_every']} commits"
    lines.append(format_table(_HEADER, [_cells(row) for row in report["results"]]))
    lines.append(f"built in {report['build_seconds']:.1f} s")
    if report["results"][0]["floor_ms"] is not None:
        lines[-1] += f"; floor at {BANDWIDTH_BYTES_PER_SECOND / 1e12:.1f} TB/s"
    baseline = report["baseline"]
    if baseline is not None:
        for row in baseline["results"]:
            lines.append(
                f"{row['engine']}, batch {row['batch']}: {row['step_ms_mean']:.3f} ms/step, "
                f"p50 {row['step_ms_p50']:.3f}, p99 {row['step_ms_p99']:.3f}, "
                f"{row['tokens_per_second']:.0f} tokens/s"
            )
        if baseline["skipped"] is not None:
            lines.append(f"baseline skipped: {baseline['skipped']}")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    timeline = row["timeline"] or {}
    return [
        str(row["batch"]),
        str(row["depth"]),
        f"{row['step_ms_mean']:.3f}",
        f"{row['step_ms_p50']:.3f}",
        f"{row['step_ms_p99']:.3f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['host_ms_p50']:.3f}",
        _optional(row["speedup_over_serial"], "{:.3f}x"),
        _optional(timeline.get("gap_us"), "{:.1f}"),
        _optional(timeline.get("graph_share"), "{:.1%}"),
        _optional(timeline.get("kernel_share"), "{:.1%}"),
        _optional(timeline.get("kernels_per_step"), "{:.0f}"),
        _optional(row["floor_ms"], "{:.3f}"),
        _optional(row["floor_share"], "{:.0%}"),
        f"{row['startup_seconds']:.1f}",
    ]


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
