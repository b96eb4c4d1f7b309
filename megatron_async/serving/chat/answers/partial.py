"""Markers whose beginning alone has come."""

from __future__ import annotations


def begun(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``marker``."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(marker[:n])), 0)
