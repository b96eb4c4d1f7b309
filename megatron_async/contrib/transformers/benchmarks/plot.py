"""Plot what ``bench.py --json`` wrote: milliseconds of a token by variant, a panel for
each model and batch; or the rows of ``--table``, ours beside stock and beside what ours may be.

python -m megatron_async.contrib.transformers.benchmarks.plot FILE.json ... -o out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = 3
COLOURS = {"stock": "gray", "ours": "tab:blue"}
OF_STOCK = ("baseline", "static", "compiled")


class Panel(NamedTuple):
    """Bars by name, with the colours of whose they are, and a line where there is a limit."""

    title: str
    unit: str
    bars: list[tuple[str, float, str]]
    limit: float | None = None


def panels_of(report: Any) -> list[Panel]:
    """The panels of one file, without what failed."""
    if isinstance(report, dict):
        return [_of_row(row) for row in report["rows"] if "ours" in row]
    rows = [row for row in report if "ms_per_token" in row]
    panels = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        bars = [
            (
                row["variant"],
                float(row["ms_per_token"]),
                COLOURS["stock" if row["variant"] in OF_STOCK else "ours"],
            )
            for row in rows
            if (row["model"], row["batch"]) == (model, batch)
        ]
        panels.append(Panel(f"{model.removeprefix('random:')}, batch {batch}", "ms/token", bars))
    return panels


def _of_row(row: dict[str, Any]) -> Panel:
    bars = [
        (row.get(f"{whose}_variant", whose), float(row[whose]), COLOURS[whose])
        for whose in ("stock", "ours")
        if whose in row
    ]
    return Panel(row["row"], row["unit"], bars, row.get("most"))


def draw(panels: list[Panel], title: str, output: Path) -> None:
    """Write the image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        names = [name for name, _, _ in panel.bars]
        places = axis.bar(
            range(len(names)),
            [height for _, height, _ in panel.bars],
            color=[colour for _, _, colour in panel.bars],
        )
        axis.bar_label(places, fmt="%.3g")
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axis.set_title(panel.title)
        axis.set_ylabel(panel.unit)
        axis.margins(y=0.12)  # for the figures on the bars
        axis.set_ylim(bottom=0)
        if panel.limit is not None:
            axis.axhline(panel.limit, color="tab:red", linestyle="--")
    figure.suptitle(title)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Read, draw, write; 2 when there is nothing to draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    reports = [json.loads(file.read_text()) for file in options.files]
    panels = [panel for report in reports for panel in panels_of(report)]
    rows = [row for report in reports for row in _rows(report)]
    devices = sorted({row["device"] for row in rows if "device" in row})
    if not panels:
        print("plot: the files hold no figures", file=sys.stderr)
        return 2
    if "cpu" in devices:
        print("plot: figures of a CPU are a trial's, and no plot", file=sys.stderr)
        return 2
    draw(panels, ", ".join(devices), options.output)
    return 0


def _rows(report: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report["rows"] if isinstance(report, dict) else report
    return found


if __name__ == "__main__":
    sys.exit(main())
