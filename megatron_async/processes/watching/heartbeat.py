"""Whether the other ranks still run: each is asked again and again, and a thread of it answers."""

from __future__ import annotations

import math
from collections.abc import Iterable

HEARTBEAT_SECONDS = 10.0
"""Without a sign of life after which a process of a server counts as frozen."""
BEATS = 10
"""Questions without an answer before a rank is taken for dead."""
PREPARING_TIMES = 8
"""As many more while a rank starts, loads or captures: extension modules that are loaded, and
compilers, may keep its interpreter, and with it the thread that answers, for many seconds."""


class Heartbeats:
    """Counts the questions that each rank owes an answer.

    Questions are counted, not seconds. While this process stands still itself, because it was
    stopped, its machine slept or its interpreter was kept, it asks nobody, and then takes what has
    come meanwhile before it asks again. So it never blames others for its own pause.

    Args:
        ranks: the others.
        seconds: of silence after which a rank that prepares nothing is taken for dead; 0 is never.
    """

    def __init__(self, ranks: Iterable[int], seconds: float) -> None:
        self.interval = seconds / BEATS
        self._owed = dict.fromkeys(ranks, 0)
        self._next = 0.0

    def heard(self, rank: int) -> None:
        """Note that a rank has said something, whatever it was."""
        self._owed[rank] = 0

    def wait_seconds(self, now: float) -> float:
        """Seconds until all are to be asked; infinite if they never are."""
        return max(0.0, self._next - now) if self.interval else math.inf

    def begin(self, now: float) -> None:
        """All are asked at ``now``; a beat that was missed before is not made up for."""
        self._next = now + self.interval

    def ask(self, rank: int, *, prepares: bool) -> bool:
        """One more question; False if it owes too many answers."""
        most = BEATS * (PREPARING_TIMES if prepares else 1)
        if self._owed[rank] >= most:
            return False
        self._owed[rank] += 1
        return True
