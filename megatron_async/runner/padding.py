"""How many rows and tokens a forward on the CPU has."""

from __future__ import annotations

CPU_ROW_MULTIPLE = 8
"""Rows and tokens of a forward on the CPU are padded to a multiple of this: the matrix products
then give a row the same bits whatever the other rows are."""


def padded_tokens(count: int) -> int:
    """Tokens of a forward on the CPU that has to compute ``count``."""
    return -(-count // CPU_ROW_MULTIPLE) * CPU_ROW_MULTIPLE
