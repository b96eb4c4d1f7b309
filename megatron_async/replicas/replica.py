"""One replica, as a front end sees it; and the sum of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_async.errors import EngineDeadError
from megatron_async.replicas.roster import Member
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.http.changes import Changes
from megatron_async.serving.messages import Control, Snapshot


class Replica:
    """One replica, as a front end sees it.

    Args:
        changes: told of what becomes of it.

    Attributes:
        own: sequences that this front end has given it and that have not ended.
        leaves: it gets no more requests.
    """

    def __init__(self, member: Member, changes: Changes) -> None:
        self.name = member.name
        self.endpoint = member.endpoint
        self.client = EngineClient(member.endpoint, changes)
        self.own = 0
        self.leaves = False
        self._changes = changes
        self._seen: Snapshot | None = None
        self._others = 0

    @property
    def is_ready(self) -> bool:
        """Whether it may get requests."""
        if self.leaves:
            return False
        try:
            self.client.check_ready()
        except EngineDeadError:
            return False
        return True

    @property
    def is_over(self) -> bool:
        """Nothing more will come of the requests of this front end: they have ended, or failed."""
        return not self.own or self.client.state != "ready"

    def leave(self) -> None:
        """Have it get no more requests."""
        self.leaves = True
        self._changes.tell()

    @contextlib.contextmanager
    def carries(self, sequences: int) -> Iterator[None]:
        """Count ``sequences`` sequences of this front end as its own meanwhile."""
        self.own += sequences
        try:
            yield
        finally:
            self.own -= sequences
            if not self.own:
                self._changes.tell()

    @property
    def is_stalled(self) -> bool:
        """Its requests wait without a step."""
        snapshot = self.client.snapshot
        return snapshot is not None and snapshot.stalled is not None

    @property
    def load(self) -> int:
        """Sequences that run or wait: those of this front end, and those of others by the replica's
        last snapshot."""
        snapshot = self.client.snapshot
        if snapshot is not self._seen:
            self._seen, self._others = snapshot, 0
            if snapshot is not None:
                gauges = snapshot.gauges
                total = gauges["requests_running"] + gauges["requests_waiting"]
                self._others = max(0, int(total) - self.own)
        return self.own + self._others

    async def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Ask it something; raises as the client's."""
        return await self.client.command(Control(0, name, arguments))


def sum_of(each: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of several replicas, of which there is at least one."""
    gauges = summed([snapshot.gauges for snapshot in each])
    gauges["weight_version"] = max(snapshot.gauges["weight_version"] for snapshot in each)
    counters = summed([snapshot.counters for snapshot in each])
    stalled = [snapshot.stalled for snapshot in each]
    reason = None if None in stalled else stalled[0]  # one that goes on serves the others' requests
    return Snapshot(max(snapshot.time for snapshot in each), counters, gauges, reason)


def summed(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of several replicas, added up by name; so are lists by place and dicts by name."""
    total: dict[str, Any] = {}
    for one in each:
        for name, value in one.items():
            total[name] = value if name not in total else _added(total[name], value)
    return total


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return summed([one, other])
    if isinstance(one, (list, tuple)):
        longer, shorter = sorted((list(one), list(other)), key=len, reverse=True)
        return [a + b for a, b in zip(longer, [*shorter, *[0] * len(longer)], strict=False)]
    return one + other
