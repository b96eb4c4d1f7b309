"""The experts that a request's tokens went to, from the steps that computed them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megatron_async.codec import from_plain
from megatron_async.errors import IntegrityError

FIRST_ROOM = 64
"""Positions that there is room for at first."""


class TokenRoutes:
    """Ids by position. What an evicted request computes again takes the place of what was there.

    Attributes:
        known: positions that have ids, from 0 on.
    """

    __slots__ = ("_ids", "known")

    def __init__(self) -> None:
        self._ids: Any = None
        self.known = 0

    def put(self, start: int, ids: Any) -> None:
        """Keep ``ids`` [positions, layers, top_k] from position ``start`` on.

        Raises:
            IntegrityError: positions before ``start`` have not come.
        """
        if start > self.known:
            raise IntegrityError(
                f"routed experts of position {start} have come before those of {self.known}"
            )
        end = start + len(ids)
        room = 0 if self._ids is None else len(self._ids)
        if end > room:
            grown = np.zeros((max(end, 2 * room, FIRST_ROOM), *ids.shape[1:]), np.int16)
            if room:
                grown[:room] = self._ids
            self._ids = grown
        self._ids[start:end] = ids
        self.known = max(self.known, end)

    def until(self, end: int) -> Any:
        """int16 ``[positions, layers, top_k]`` of those before ``end`` that are known; None of a
        request that nothing was computed of."""
        return None if self._ids is None else self._ids[: min(end, self.known)].copy()


def packed_ids(ids: Any) -> dict[str, Any]:
    """Experts of tokens, int16 ``[positions, layers, top_k]``, as their shape and base64."""
    return {"shape": list(ids.shape), "int16": base64.b64encode(ids.tobytes()).decode()}


def unpacked_ids(data: Any) -> Any:
    """The inverse of :func:`packed_ids`; raises ValueError, KeyError or TypeError for others."""
    ids = np.frombuffer(base64.b64decode(data["int16"], validate=True), np.int16)
    return ids.reshape(from_plain(data["shape"], list[int])).copy()
