"""The table of the ragged workload."""

from __future__ import annotations

from typing import Any

from .bench_report import heading, optional, slowed, tail
from .table import format_table

_HEADER = (
    "arrival",
    "depth",
    "wall-s",
    "out-tok/s",
    "all-tok/s",
    "vs-serial",
    "ttft-p50",
    "ttft-p99",
    "tpot-p50",
    "tpot-p99",
    "itl-p50",
    "itl-p99",
    "steps",
    "mixed",
    "decode",
    "batch",
    "host-ms",
    "stopped",
    "discarded",
    "evicted",
    "differ",
    "in-step",
    "idle-kernel",
    "idle-launch",
    "start-s",
)


def as_table(report: dict[str, Any]) -> str:
    """The report for people; times in milliseconds, "idle" by the profiler."""
    load = report["load"]
    prompt, output = load["prompt_range"], load["output_range"]
    lines = [
        f"{heading(report)}, ragged: {load['requests']} requests, at most {load['max_requests']} "
        f"at once, prompts of {prompt[0]}-{prompt[1]} tokens, outputs of {output[0]}-{output[1]}"
        + slowed(load)
    ]
    lines.append(format_table(_HEADER, [_cells(row) for row in report["results"]]))
    lines.append(f"built in {report['build_seconds']:.1f} s")
    return "\n".join([*lines, *tail(report)])


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return ["-", str(row["depth"]), "failed"] + ["-"] * (len(_HEADER) - 3)
    timeline = row["timeline"] or {}
    kernels, launches = timeline.get("kernel_share"), timeline.get("graph_share")
    return [
        "at-once" if row["arrival_rate"] == "inf" else f"{row['arrival_rate']}/s",
        str(row["depth"]),
        f"{row['seconds']:.2f}",
        f"{row['output_tokens_per_second']:.0f}",
        f"{row['tokens_per_second']:.0f}",
        optional(row["speedup_over_serial"], "{:.3f}x"),
        optional(row["first_token_ms_p50"], "{:.1f}"),
        optional(row["first_token_ms_p99"], "{:.1f}"),
        optional(row["token_ms_request_mean_p50"], "{:.2f}"),
        optional(row["token_ms_request_mean_p99"], "{:.2f}"),
        optional(row["token_ms_between_p50"], "{:.2f}"),
        optional(row["token_ms_between_p99"], "{:.2f}"),
        str(row["steps"]),
        str(row["steps_mixed"]),
        str(row["steps_decode"]),
        f"{row['rows_mean']:.1f}",
        f"{row['host_ms_mean']:.3f}",
        str(row["stopped"]),
        str(row["tokens_discarded"]),
        str(row["evictions"]),
        str(row["requests_different"]),
        optional((row["events"] or {}).get("inside_share"), "{:.2%}"),
        optional(None if kernels is None else 1 - kernels, "{:.1%}"),
        optional(None if launches is None else 1 - launches, "{:.1%}"),
        f"{row['startup_seconds']:.1f}",
    ]
