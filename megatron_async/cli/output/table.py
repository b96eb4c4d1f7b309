"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_columns(header: Sequence[str], rows: Mapping[str, Sequence[object]]) -> str:
    """A table whose rows are named: a column for each run, a row for each figure."""
    return format_table(["", *header], [[name, *values] for name, values in rows.items()])


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell: the first left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join((first, *rest)).rstrip())
    return "\n".join(lines)
