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


class Bar(NamedTuple):
    """``kind``: serial, ours, other."""

    name: str
    height: float
    kind: str


class Panel(NamedTuple):
    """One load on one shape; the floor is None where there is none."""

    title: str
    unit: str
    bars: list[Bar]
    floor: float | None


COLOURS = {"serial": "tab:gray", "ours": "tab:blue", "other": "tab:orange"}


def panels_of(report: dict[str, Any], others: list[tuple[str, int, Bar]]) -> list[Panel]:
    """The panels of one report, without what failed."""
    ragged = report["workload"] == "ragged"
    case, height, unit = "batch", "step_ms_mean", "ms/step"
    if ragged:
        case, height, unit = "arrival_rate", "output_tokens_per_second", "output tokens/s"
    load, rows = report["load"], [row for row in report["results"] if "error" not in row]
    added = ", sampled" if load.get("temperature") else ""
    added += ", host slowed" if load["host_work_us"] or load["stall_us"] else ""
    found = [row for baseline in report["baselines"] for row in baseline["results"]]
    panels = []
    for key in dict.fromkeys(row[case] for row in rows):
        mine = [row for row in rows if row[case] == key]
        bars = [
            Bar(f"depth {row['depth']}", float(row[height]), "ours" if row["depth"] else "serial")
            for row in mine
        ]
        title = f"{report['shape']}, batch {key}"
        if ragged:
            # Baselines serve all requests at once.
            bars += [_other(row, "tokens_per_second") for row in found if key == "inf"]
            title = f"{report['shape']}, ragged, " + ("at once" if key == "inf" else f"{key}/s")
        else:
            bars += [_other(row, height) for row in found if row["batch"] == key]
            bars += [bar for shape, at, bar in others if (shape, at) == (report["shape"], key)]
        floor = mine[0].get("floor_ms")
        panels.append(Panel(title + added, unit, bars, None if floor is None else float(floor)))
    return panels


def _other(row: dict[str, Any], height: str) -> Bar:
    name = "transformers"
    if "continuous" in row["engine"]:
        name += " cb async" if "asynchronous" in row["engine"] else " cb"
    return Bar(name, float(row[height]), "other")


def draw(panels: list[Panel], heading: str, out: Path) -> None:
    """Write the panels as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(panels) // COLUMNS)
    columns = -(-len(panels) // lines)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(max(4.5, 3.4 * columns), 4 * lines), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        places = range(len(panel.bars))
        colours = [COLOURS[bar.kind] for bar in panel.bars]
        drawn = axis.bar(places, [bar.height for bar in panel.bars], color=colours)
        axis.set_xticks(places, [bar.name for bar in panel.bars], rotation=45, ha="right")
        axis.bar_label(drawn, fmt="%.0f" if "tokens" in panel.unit else "%.3f", fontsize=8)
        if panel.floor is not None:
            label = f"floor {panel.floor:.3f} ms"
            axis.axhline(panel.floor, color="tab:red", linestyle="--", label=label)
            axis.legend(loc="upper left", fontsize=8)
        axis.margins(y=0.12)
        axis.set_title(panel.title, fontsize=10)
        axis.set_ylabel(panel.unit, fontsize=8)
        axis.tick_params(labelsize=8)
    figure.suptitle(heading, fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=150, format="png")
    pyplot.close(figure)


def other(text: str) -> tuple[str, int, Bar]:
    """SHAPE:BATCH:NAME=MS, a figure measured elsewhere."""
    try:
        where, height = text.rsplit("=", 1)
        shape, batch, name = where.split(":", 2)
        return shape, int(batch), Bar(name, float(height), "other")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be SHAPE:BATCH:NAME=MS") from None


def read_panels(files: list[Path], others: list[tuple[str, int, Bar]]) -> tuple[list[Panel], str]:
    """All panels, and the machines that were measured.

    Raises:
        ValueError: a file is none of bench, or a figure of ``others`` has no panel.
    """
    panels: list[Panel] = []
    machines: dict[str, None] = {}
    for file in files:
        try:
            report = json.loads(file.read_text())
            panels += panels_of(report, others)
            machines[f"{report['device_name']}, {report['dtype']}, {report['date'][:10]}"] = None
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: not of this version of bench ({error})") from error
    if not panels:
        raise ValueError("nothing in these files was measured")
    for shape, batch, bar in others:
        if not any(bar is shown for panel in panels for shown in panel.bars):
            there = "; ".join(dict.fromkeys(panel.title for panel in panels))
            missing = f"--other {shape}:{batch}:{bar.name}"
            raise ValueError(f"{missing}: there is no such panel, but these: {there}")
    return panels, "; ".join(machines)


def main() -> int:
    """Run the script and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON of megatron-async bench")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PNG")
    parser.add_argument("--other", type=other, action="append", default=[], metavar="S:B:NAME=MS")
    args = parser.parse_args()
    try:
        panels, heading = read_panels(args.files, args.other)
        draw(panels, heading, args.output)
    except (ImportError, OSError, ValueError) as error:
        print(f"plot_bench: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
