"""Which replicas there are, and what a new one must know. One for all front ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from megatron_async.processes.messages import NotStarted
from megatron_async.serving.messages import Endpoint, Kept

LAPSE_SECONDS = 20.0
"""After which a member that gives no sign of life is none any more: several of its health checks,
each of which asks for its standing."""


class Member(msgspec.Struct, frozen=True):
    """A replica that serves, and its engine process."""

    name: str
    endpoint: Endpoint


class Listing(msgspec.Struct, frozen=True):
    """All members at a time.

    Args:
        version: another one for each change.
        kept: what all replicas were told, and new ones must know.
        failure: why the last one that could not start did not.
        is_settled: the roster is old enough to know all members: a member that is missing has gone.
    """

    version: int
    members: tuple[Member, ...]
    kept: Kept
    failure: NotStarted | None = None
    is_settled: bool = True


class Directory(Protocol):
    """What a front end needs of the :class:`Roster`, wherever that is."""

    async def changed(self, version: int) -> Listing:
        """The members as soon as their version is another one than ``version``, or now and then."""

    async def keep(self, kept: Kept) -> Listing:
        """Replicas were told this. The members that know it, or must be told it too."""

    async def expel(self, name: str) -> None:
        """A replica is not what the others are: nobody may ask it, and it is to be replaced."""


class Roster:
    """Members join with the weights that all have, or do not join. So a change of weights that
    is first kept here and then told all members reaches every replica, whenever it starts.

    It forgets all when its process dies; then the members join again, with what they know.

    Args:
        clock: seconds. A member that has not asked for its standing for :data:`LAPSE_SECONDS` is
            gone; one that is not joins again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept = Kept()
        self._clock = clock
        self._born = clock()
        self._seen: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        """Versions with which members joined."""
        self._failure: NotStarted | None = None
        self._members: dict[str, Member] = {}
        self._expelled: set[str] = set()
        self._version = random.randrange(1, 2**31)  # not that of a roster before this one
        self._changed = asyncio.Event()

    def listing(self) -> Listing:
        """All members now."""
        oldest = self._clock() - LAPSE_SECONDS
        for name in [name for name, seen in self._seen.items() if seen < oldest]:
            self.leave(name)
        members = tuple(self._members.values())
        is_settled = oldest >= self._born
        return Listing(self._version, members, self.kept, self._failure, is_settled)

    async def changed(self, version: int, seconds: float) -> Listing:
        """The members as soon as their version is another one, or after ``seconds``."""
        if version == self._version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        return self.listing()

    def join(self, member: Member, kept: Kept) -> bool:
        """A replica serves, and knows ``kept``; False when there is more to know."""
        if kept.weight_version > self.kept.weight_version:
            # This roster is newer than the weights: one that joined without them was too early.
            self.kept = kept
            for name in [n for n, v in self._weights.items() if v < kept.weight_version]:
                self.leave(name)
        if kept.weight_version < self.kept.weight_version:
            return False
        self._seen[member.name] = self._clock()
        self._weights[member.name] = kept.weight_version
        if self._members.get(member.name) != member:
            self._members[member.name] = member
            self._change()
        return True

    def fail(self, failure: NotStarted) -> None:
        """A replica cannot start."""
        self._failure = failure
        self._change()

    def standing(self, name: str) -> str:
        """Return the standing of a replica: "member", "expelled", or "unknown"."""
        if name in self._expelled:
            return "expelled"
        if name not in self._members:
            return "unknown"
        self._seen[name] = self._clock()
        return "member"

    def leave(self, name: str) -> None:
        """A replica takes no requests any more. Nothing happens when it is no member."""
        self._seen.pop(name, None)
        self._weights.pop(name, None)
        if self._members.pop(name, None) is not None:
            self._change()

    def expel(self, name: str) -> None:
        """See :class:`Directory`."""
        self._expelled.add(name)
        self.leave(name)

    def keep(self, kept: Kept) -> Listing:
        """See :class:`Directory`. What is older than what is known changes nothing."""
        if kept.weight_version >= self.kept.weight_version:
            self.kept = kept
        return self.listing()

    def _change(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
