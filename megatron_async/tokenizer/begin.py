"""Begin tokens of a prompt."""

from __future__ import annotations

import itertools


def behind_begin(ids: list[int], begin: int | None) -> list[int]:
    """``ids`` without the ``begin`` tokens that they start with."""
    return list(itertools.dropwhile(lambda token: token == begin, ids))
