"""Plot what ``megatron-async bench --json`` wrote: milliseconds of a step beside the floor.

python scripts/plot_bench.py FILE.json -o out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], out: Path) -> None:
    """Write a PNG: one panel for each batch size, a bar for each depth and for the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = report["results"]
    batches = list(dict.fromkeys(row["batch"] for row in results))
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(max(4.0, 3.2 * len(batches)), 4), squeeze=False
    )
    for panel, batch in zip(panels[0], batches, strict=True):
        rows = [row for row in results if row["batch"] == batch]
        names = [f"depth {row['depth']}" for row in rows]
        heights = [row["step_ms_mean"] for row in rows]
        colours = ["tab:gray" if row["depth"] == 0 else "tab:blue" for row in rows]
        for row in (report["baseline"] or {"results": []})["results"]:
            if row["batch"] == batch:
                names.append("transformers")
                heights.append(row["step_ms_mean"])
                colours.append("tab:orange")
        bars = panel.bar(names, heights, color=colours)
        panel.bar_label(bars, fmt="%.3f", fontsize=8)
        floor = rows[0]["floor_ms"]
        if floor is not None:
            panel.axhline(floor, color="tab:red", linestyle="--", label=f"floor {floor:.3f} ms")
            panel.legend(loc="lower right", fontsize=8)
        panel.set_title(f"batch {batch}", fontsize=10)
        panel.tick_params(axis="x", rotation=45, labelsize=8)
    panels[0][0].set_ylabel("ms per decode step")
    load = report["load"]
    slowed = ", host slowed on purpose" if load["host_work_us"] or load["stall_us"] else ""
    figure.suptitle(
        f"{report['shape']}, {report['dtype']}, {report['device_name']}, prompt "
        f"{load['prompt_tokens']}, {load['new_tokens']} new tokens, {report['date'][:10]}{slowed}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(out, dpi=150, format="png")
    pyplot.close(figure)


def main() -> int:
    """Run the script and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="JSON of megatron-async bench")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PNG")
    args = parser.parse_args()
    try:
        plot(json.loads(args.file.read_text()), args.output)
    except ImportError:
        print("plot_bench: error: needs matplotlib; pip install matplotlib", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"plot_bench: error: {args.file}: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"plot_bench: error: {args.file}: not of bench, no {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
