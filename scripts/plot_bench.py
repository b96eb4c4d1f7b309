"""Plot what ``megatron-async bench --json`` wrote, a panel for each load: milliseconds of a step
and the floor, or tokens a second of a ragged load.

python scripts/plot_bench.py FILE.json ... -o out.png [--other llama8b:32:vLLM=5.49 ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = 4
LONG_PROMPT = 1024
"""The fewest tokens of a prompt that a panel names."""


class Bar(NamedTuple):
    """Its name, height and colour."""

    name: str
    height: float
    colour: str = "tab:orange"


class Panel(NamedTuple):
    """One load on one shape; the floor is None where there is none."""

    title: str
    unit: str
    bars: list[Bar]
    floor: float | None


def panels_of(report: dict[str, Any], others: list[tuple[str, int, Bar]]) -> list[Panel]:
    """The panels of one report, without what failed."""
    ragged, shape, load = report["workload"] == "ragged", report["shape"], report["load"]
    case, height, unit = "batch", "step_ms_mean", "ms/step"
    if ragged:
        case, height, unit = "arrival_rate", "output_tokens_per_second", "output tokens/s"
    added = ", sampled" if load.get("temperature") else ""
    added += ", host slowed" if load["host_work_us"] or load["stall_us"] else ""
    rows = [row for row in report["results"] if "error" not in row]
    found = [row for baseline in report["baselines"] for row in baseline["results"]]
    panels = []
    for key in dict.fromkeys(row[case] for row in rows):
        mine = [row for row in rows if row[case] == key]
        bars = [
            Bar(_name(row), float(row[height]), "tab:blue" if row["depth"] else "gray")
            for row in mine
        ]
        if ragged:  # baselines serve all requests at once
            title = "ragged, at once" if key == "inf" else f"ragged, {key}/s"
            bars += [_baseline(row, "tokens_per_second") for row in found if key == "inf"]
        else:
            title = f"batch {key}"
            if (prompt := load.get("prompt_tokens", 0)) >= LONG_PROMPT:
                title += f", prompt {prompt:,}"
            bars += [_baseline(row, height) for row in found if row["batch"] == key]
            bars += [bar for *where, bar in others if where == [shape, key]]
        panels.append(Panel(f"{shape}, {title}{added}", unit, bars, mine[0].get("floor_ms")))
    return panels


def _name(row: dict[str, Any]) -> str:
    window = row.get("window", 1)
    return f"depth {row['depth']}" + (f", window {window}" if window > 1 else "")


def _baseline(row: dict[str, Any], height: str) -> Bar:
    batching = " cb" if "continuous" in row["engine"] else ""
    way = " async" if batching and "asynchronous" in row["engine"] else ""
    return Bar(f"transformers{batching}{way}", float(row[height]))


def draw(panels: list[Panel], heading: str, out: Path) -> None:
    """Write the panels as a PNG."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["font.size"] = 8
    lines = -(-len(panels) // COLUMNS)
    columns = -(-len(panels) // lines)
    figure = Figure(figsize=(max(4.5, 3.4 * columns), 4 * lines), layout="constrained")
    figure.suptitle(heading)
    for place, panel in enumerate(panels, 1):
        axis = figure.add_subplot(lines, columns, place, title=panel.title, ylabel=panel.unit)
        names, heights, colours = zip(*panel.bars, strict=True)
        drawn = axis.bar(range(len(names)), heights, color=colours)
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axis.bar_label(drawn, fmt="%.0f" if "tokens" in panel.unit else "%.3f")
        axis.margins(y=0.2)
        if panel.floor is not None:
            label = f"floor {panel.floor:.3f} ms"
            axis.axhline(panel.floor, color="tab:red", linestyle="--", label=label)
            axis.legend(loc="upper left")
    figure.savefig(out, dpi=150, format="png")


def other(text: str) -> tuple[str, int, Bar]:
    """SHAPE:BATCH:NAME=MS, a figure measured elsewhere."""
    try:
        where, height = text.rsplit("=", 1)
        shape, batch, name = where.split(":", 2)
        return shape, int(batch), Bar(name, float(height))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be SHAPE:BATCH:NAME=MS") from None


def read_panels(files: list[Path], others: list[tuple[str, int, Bar]]) -> tuple[list[Panel], str]:
    """All panels, and the machines that were measured.

    Raises:
        ValueError: a file is none of bench, or a figure of ``others`` has no panel.
    """
    panels: list[Panel] = []
    machines = []
    for file in files:
        try:
            report = json.loads(file.read_text())
            panels += panels_of(report, others)
            machines.append(f"{report['device_name']}, {report['dtype']}, {report['date'][:10]}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = f"{file}: not JSON of this version of bench ({type(error).__name__}: {error})"
            raise ValueError(said) from error
    titles = "; ".join(dict.fromkeys(panel.title for panel in panels))
    if not titles:
        raise ValueError("nothing in these files was measured")
    for shape, batch, bar in others:
        if not any(bar is shown for panel in panels for shown in panel.bars):
            missing = f"--other {shape}:{batch}:{bar.name}"
            raise ValueError(f"{missing}: there is no such panel, but these: {titles}")
    return panels, "; ".join(dict.fromkeys(machines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON of megatron-async bench")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PNG")
    parser.add_argument("--other", type=other, action="append", default=[], metavar="S:B:NAME=MS")
    args = parser.parse_args()
    try:
        draw(*read_panels(args.files, args.other), args.output)
    except (ImportError, OSError, ValueError) as error:
        print(f"plot_bench: error: {error}", file=sys.stderr)
        sys.exit(2)
