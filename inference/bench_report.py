"""What ``bench`` found of decode steps: plain JSON, and a table for people."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from megatron_async.models.fused.report import lines as fallback_lines
from megatron_async.version import __version__

from .bench_decode import Round
from .bench_engine import Started
from .bench_host import HostConditions, conditions_line
from .bench_load import Load
from .bench_timeline import percentile
from .shapes import floor_ms
from .subject import Subject
from .table import format_table

SCHEMA_VERSION = 2

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
    "in-graph-events",
    "kernels-active",
    "kernels",
    "floor-ms",
    "of-floor",
    "start-s",
    "capture-s",
)


def figures(
    subject: Subject,
    load: Load,
    batch_size: int,
    depth: int,
    rounds: Sequence[Round],
    *,
    started: Started,
    bandwidth: float | None,
) -> dict[str, Any]:
    """One row of the report; times in milliseconds unless their name says otherwise.

    Args:
        bandwidth: of the device's memory in bytes per second, for the floor; None: there is none.
    """
    steps = [ns * 1e-6 for one in rounds for ns in one.step_ns]
    hosts = [ns * 1e-6 for one in rounds for ns in one.host_ns]
    mean = statistics.fmean(steps)
    floor = None
    if bandwidth is not None:
        floor = floor_ms(
            subject.config,
            subject.dtype.itemsize,
            bandwidth,
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
        "round_host_ms": [statistics.median(one.host_ns) * 1e-6 for one in rounds],
        "speedup_over_serial": None,
        "floor_ms": floor,
        "floor_share": None if floor is None else floor / mean,
        "startup_seconds": started.seconds,
        "capture_seconds": started.capture_seconds,
        "graphs": started.graphs,
        "events": None,
        "timeline": None,
    }


def compare_with_serial(results: list[dict[str, Any]]) -> None:
    """Fill in how many times faster than depth 0 each row is, where depth 0 was measured."""
    good = [row for row in results if "error" not in row]
    serial = {row["batch"]: row["step_ms_mean"] for row in good if row["depth"] == 0}
    for row in good:
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
    """The report for people: a line on what was measured, a table, and what else there is."""
    load = report["load"]
    lines = [f"{heading(report)}, prompt {load['prompt_tokens']}, {load['new_tokens']} new tokens"]
    lines[0] += sampled(load) + slowed(load)
    lines.append(format_table(_HEADER, [_cells(row) for row in report["results"]]))
    lines.append(f"built in {report['build_seconds']:.1f} s")
    if report["bandwidth_bytes_per_second"] is not None:
        lines[-1] += f"; floor at {report['bandwidth_bytes_per_second'] / 1e12:.2f} TB/s"
    if any((row.get("events") or {}).get("in_timed_round") for row in report["results"]):
        lines[-1] += "; events were recorded in the timed rounds"
    return "\n".join([*lines, *tail(report)])


def heading(report: dict[str, Any]) -> str:
    """Model, type and device."""
    return f"{report['shape']}, {report['dtype']}, {report['device_name']}"


def sampled(load: dict[str, Any]) -> str:
    """How tokens were sampled; nothing where greedily."""
    if not load.get("temperature"):
        return ""
    said = f", temperature {load['temperature']:g}"
    if load["top_k"]:
        said += f", top-k {load['top_k']}"
    if load["top_p"]:
        said += f", top-p {load['top_p']:g}"
    return said


def slowed(load: dict[str, Any]) -> str:
    """What was added to the host on purpose."""
    said = ""
    if load["host_work_us"]:
        said += f", {load['host_work_us']:g} us of host work in each commit"
    if load["stall_us"]:
        said += f", a stall of {load['stall_us']:g} us every {load['stall_every']} commits"
    return said


def tail(report: dict[str, Any]) -> list[str]:
    """Lines below a table: the host, the slower decode path, failures, phases of the start,
    baselines."""
    lines = []
    rounds = [one for row in report["results"] for one in row.get("host_conditions", ())]
    if rounds:
        lines.append(conditions_line([HostConditions(**one) for one in rounds]))
    if report["device"] != "cpu":
        lines += fallback_lines(report["fused_decode_off"], report["decode_coverage"])
    for row in report["results"]:
        if "error" in row:
            batch = f"batch {row['batch']}, " if "batch" in row else ""
            lines.append(f"failed: {batch}depth {row['depth']}: {row['error']}")
    startup = report["startup"]
    if startup is not None:
        phases = {**startup["phases"], "total": startup["total"]}
        rows = [[name, *(f"{value:.2f}" for value in values)] for name, values in phases.items()]
        lines.append(f"start, {startup['graphs']} graphs, {startup['max_requests']} rows:")
        lines.append(format_table(("phase", "first-s", "second-s"), rows))
    for baseline in report["baselines"]:
        lines += [baseline_line(row) for row in baseline["results"]]
        lines += [f"baseline {baseline['name']} skipped: {why}" for why in baseline["skipped"]]
    return lines


def baseline_line(row: dict[str, Any]) -> str:
    """One measurement of another engine."""
    line = f"{row['engine']}, batch {row['batch']}: "
    if "step_ms_mean" not in row:
        return line + f"{row['seconds']:.2f} s, {row['tokens_per_second']:.0f} output tokens/s"
    return line + (
        f"{row['step_ms_mean']:.3f} ms/step, p50 {row['step_ms_p50']:.3f}, "
        f"p99 {row['step_ms_p99']:.3f}, {row['tokens_per_second']:.0f} tokens/s"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [str(row["batch"]), str(row["depth"]), "failed"] + ["-"] * (len(_HEADER) - 3)
    timeline = row["timeline"] or {}
    return [
        str(row["batch"]),
        str(row["depth"]),
        f"{row['step_ms_mean']:.3f}",
        f"{row['step_ms_p50']:.3f}",
        f"{row['step_ms_p99']:.3f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['host_ms_p50']:.3f}",
        optional(row["speedup_over_serial"], "{:.3f}x"),
        optional(timeline.get("gap_us"), "{:.1f}"),
        optional(timeline.get("graph_share"), "{:.1%}"),
        optional((row["events"] or {}).get("inside_share"), "{:.2%}"),
        optional(timeline.get("kernel_share"), "{:.1%}"),
        optional(timeline.get("kernels_per_step"), "{:.0f}"),
        optional(row["floor_ms"], "{:.3f}"),
        optional(row["floor_share"], "{:.0%}"),
        f"{row['startup_seconds']:.1f}",
        f"{row['capture_seconds']:.1f}",
    ]


def optional(value: float | None, form: str) -> str:
    """``value`` in ``form``, a dash for what was not measured."""
    return "-" if value is None else form.format(value)
