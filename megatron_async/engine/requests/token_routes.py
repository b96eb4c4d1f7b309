"""The experts that a request's tokens went to, from the steps that computed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_async.errors import IntegrityError
from megatron_async.scheduler.events import Commit
from megatron_async.step.plan import Plan
from megatron_async.step.records import RoutedIds, Routes

if TYPE_CHECKING:
    from megatron_async.engine.requests.live_request import LiveRequest

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

    def put(self, start: int, ids: RoutedIds) -> None:
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


def keep_decoded(
    entries: Mapping[int, LiveRequest], plan: Plan, commit: Commit, routes: Routes
) -> None:
    """Keep those of the decode rows of a plan, whose tokens the requests have not got yet: a row's
    newest token, and the drafts that were accepted behind it."""
    keys = commit.keys[: plan.decode_rows]
    for key, tokens, first in zip(keys, commit.tokens, routes.firsts, strict=False):
        entry = entries[key]
        if entry.routes is not None and tokens and key not in commit.discarded:
            request = entry.request
            newest = len(request.prompt_tokens) + len(request.generated_tokens) - 1
            entry.routes.put(newest, routes.ids[first : first + len(tokens)])


def keep_prefilled(entries: Mapping[int, LiveRequest], plan: Plan, routes: Routes) -> None:
    """Keep those of the prompt chunks of a plan, and of cached prefixes before them."""
    for chunk in plan.prefills:
        entry = entries.get(plan.rows.keys[chunk.row])
        if entry is None or entry.routes is None or entry.request.finish_reason is not None:
            continue
        if (prefix := routes.prefixes.get(chunk.row)) is not None:
            entry.routes.put(0, prefix)
        first = routes.firsts[chunk.row]
        entry.routes.put(chunk.start, routes.ids[first : first + len(chunk.tokens)])
