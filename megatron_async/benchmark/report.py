"""What ``bench`` found, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_async.benchmark.measuring.host import HostConditions, conditions_line
from megatron_async.cli.output.table import format_table
from megatron_async.models.fused.report import lines as fallback_lines
from megatron_async.perfetto.bubble import said


class Column(NamedTuple):
    """Its header, where the value stands in a row, how it is shown, and whether it is there only
    where something drafts."""

    header: str
    path: str
    show: Callable[[Any], str] = str
    of_drafts: bool = False

    def cell(self, row: dict[str, Any]) -> str:
        """A dash for what was not measured."""
        found: Any = row
        for key in self.path.split("."):
            found = None if found is None else found.get(key)
        return "-" if found is None else self.show(found)


def _arrival(rate: str) -> str:
    return "at-once" if rate == "inf" else f"{rate}/s"


def _rest(share: float) -> str:
    return f"{1 - share:.1%}"


def _shares(shares: list[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares) + "%" if shares else "-"


_0, _1, _2, _3 = ("{:.0f}".format, "{:.1f}".format, "{:.2f}".format, "{:.3f}".format)
_TIMES, _SHARE = "{:.3f}x".format, "{:.1%}".format

DRAFT_COLUMNS = (
    Column("window", "window", of_drafts=True),
    Column("tokens/step", "tokens_per_step", _2, of_drafts=True),
    Column("accepted", "acceptance_by_position", _shares, of_drafts=True),
)

COLUMNS = {
    "decode": (
        Column("batch", "batch"),
        Column("depth", "depth"),
        *DRAFT_COLUMNS,
        Column("ms/step", "step_ms_mean", _3),
        Column("of-plain", "step_ratio", _TIMES, of_drafts=True),
        Column("p50", "step_ms_p50", _3),
        Column("p99", "step_ms_p99", _3),
        Column("tokens/s", "tokens_per_second", _0),
        Column("vs-plain", "speedup_over_plain", _TIMES, of_drafts=True),
        Column("host-ms", "host_ms_p50", _3),
        Column("vs-serial", "speedup_over_serial", _TIMES),
        Column("gap-us", "timeline.gap_us", _1),
        Column("in-graph", "timeline.graph_share", _SHARE),
        Column("in-graph-events", "events.inside_share", "{:.2%}".format),
        Column("kernels-active", "timeline.kernel_share", _SHARE),
        Column("kernels", "timeline.kernels_per_step", _0),
        Column("floor-ms", "floor_ms", _3),
        Column("of-floor", "floor_share", "{:.0%}".format),
        Column("start-s", "startup_seconds", _1),
        Column("capture-s", "capture_seconds", _1),
    ),
    # Times in milliseconds; "idle" by the profiler.
    "ragged": (
        Column("arrival", "arrival_rate", _arrival),
        Column("depth", "depth"),
        *DRAFT_COLUMNS,
        Column("wall-s", "seconds", _2),
        Column("out-tok/s", "output_tokens_per_second", _0),
        Column("all-tok/s", "tokens_per_second", _0),
        Column("vs-serial", "speedup_over_serial", _TIMES),
        Column("vs-plain", "speedup_over_plain", _TIMES, of_drafts=True),
        Column("ttft-p50", "first_token_ms_p50", _1),
        Column("ttft-p99", "first_token_ms_p99", _1),
        Column("tpot-p50", "token_ms_request_mean_p50", _2),
        Column("tpot-p99", "token_ms_request_mean_p99", _2),
        Column("itl-p50", "token_ms_between_p50", _2),
        Column("itl-p99", "token_ms_between_p99", _2),
        Column("steps", "steps"),
        Column("mixed", "steps_mixed"),
        Column("decode", "steps_decode"),
        Column("batch", "rows_mean", _1),
        Column("host-ms", "host_ms_mean", _3),
        Column("stopped", "stopped"),
        Column("discarded", "tokens_discarded"),
        Column("evicted", "evictions"),
        Column("differ", "requests_different"),
        Column("in-step", "events.inside_share", "{:.2%}".format),
        Column("idle-kernel", "timeline.kernel_share", _rest),
        Column("idle-launch", "timeline.graph_share", _rest),
        Column("start-s", "startup_seconds", _1),
    ),
}
"""By workload; ``docs/benchmarking.md`` says what they mean."""


def as_table(report: dict[str, Any]) -> str:
    """The report for people: a line on what was measured, a table, and what else there is."""
    drafts = report["drafts"] is not None
    columns = [each for each in COLUMNS[report["workload"]] if drafts or not each.of_drafts]
    header = [column.header for column in columns]
    built = f"built in {report['build_seconds']:.1f} s"
    if report["workload"] == "decode":
        if report["bandwidth_bytes_per_second"] is not None:
            built += f"; floor at {report['bandwidth_bytes_per_second'] / 1e12:.2f} TB/s"
        if any((row.get("events") or {}).get("in_timed_round") for row in report["results"]):
            built += "; events were recorded in the timed rounds"
    table = format_table(header, [_cells(columns, row) for row in report["results"]])
    return "\n".join([_heading(report), table, built, *_tail(report)])


def _cells(columns: Sequence[Column], row: dict[str, Any]) -> list[str]:
    cells = [column.cell(row) for column in columns]
    if "error" in row:
        known = 2 + columns[2].of_drafts
        cells[known:] = ["failed"] + ["-"] * (len(columns) - known - 1)
    return cells


def _heading(report: dict[str, Any]) -> str:
    """Model, type, device and load."""
    load = report["load"]
    said = f"{report['shape']}, {report['dtype']}, "
    if report["kv_cache_dtype"] is not None:
        said += f"KV cache in {report['kv_cache_dtype']}, "
    said += f"{report['device_name']}, "
    if report["workload"] == "ragged":
        prompt, output = load["prompt_range"], load["output_range"]
        said += f"ragged: {load['requests']} requests, at most {load['max_requests']} at once"
        said += f", prompts of {prompt[0]}-{prompt[1]} tokens, outputs of {output[0]}-{output[1]}"
    else:
        said += f"prompt {load['prompt_tokens']}, {load['new_tokens']} new tokens"
        said += f", text of {load['prompt_file']}" if load["prompt_file"] else ""
    for name in ("temperature", "top_k", "top_p"):
        if load.get(name):
            said += f", {name.replace('_', '-')} {load[name]:g}"
    if load.get("sampling"):
        rows = "all" if load["sampling_rows"] is None else load["sampling_rows"]
        said += f", {load['sampling']} in {rows} rows"
    said += _drafts(report["drafts"])
    if load["host_work_us"]:
        said += f", {load['host_work_us']:g} us of host work in each commit"
    if load["stall_us"]:
        said += f", a stall of {load['stall_us']:g} us every {load['stall_every']} commits"
    return said


def _drafts(drafts: dict[str, Any] | None) -> str:
    """Say what drafts; that acceptance is synthetic stands before all figures."""
    if drafts is None:
        return ""
    who = {"mtp": "multi-token prediction", "ngram": "prompt look-up", "grammar": "grammars"}
    said = f", drafts by {drafts['draft_model'] or who[drafts['speculative_method']]}"
    rate = drafts["synthetic_acceptance"]
    if rate is not None:
        said += f", synthetic acceptance {rate:g} (cost only: the tokens mean nothing)"
    return said


def _tail(report: dict[str, Any]) -> list[str]:
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
            window = f", window {row['window']}" if row.get("window", 1) > 1 else ""
            lines.append(f"failed: {batch}depth {row['depth']}{window}: {row['error']}")
    lines += _bubbles(report["results"])
    startup = report["startup"]
    if startup is not None:
        phases = {**startup["phases"], "total": startup["total"]}
        table = [
            [name, *("-" if value is None else _2(value) for value in values)]
            for name, values in phases.items()
        ]
        lines.append(f"start, {startup['graphs']} graphs, {startup['max_requests']} rows:")
        lines.append(format_table(("phase", "first-s", "second-s"), table))
    for baseline in report["baselines"]:
        lines += [_baseline_line(row) for row in baseline["results"]]
        lines += [f"baseline {baseline['name']} skipped: {why}" for why in baseline["skipped"]]
    return lines


def _bubbles(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each row with pipeline stages the share of the time in which these did not compute."""
    lines = []
    for row in rows:
        shares = (row.get("events") or {}).get("bubble")
        if shares:
            where = f"batch {row['batch']}, " if "batch" in row else ""
            lines.append(f"bubble, {where}depth {row['depth']}: {said(shares)}")
    return lines


def _baseline_line(row: dict[str, Any]) -> str:
    """One measurement of another engine."""
    line = f"{row['engine']}, batch {row['batch']}: "
    if "step_ms_mean" not in row:
        return line + f"{row['seconds']:.2f} s, {row['tokens_per_second']:.0f} output tokens/s"
    line += f"{row['step_ms_mean']:.3f} ms/step, p50 {row['step_ms_p50']:.3f}, "
    return line + f"p99 {row['step_ms_p99']:.3f}, {row['tokens_per_second']:.0f} tokens/s"
