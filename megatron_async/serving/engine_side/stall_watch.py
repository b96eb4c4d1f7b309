"""Notices an engine that takes no step though requests wait for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
STEP_FACTOR = 10
"""One step, or a change of weights, may take this many times as long: what runs does not sleep."""


class Seen(NamedTuple):
    """What can be seen of an engine without a lock, so that nobody waits for it.

    Args:
        steps: launched and committed.
        begun: times that the loop's step was entered.
        is_inside: somebody steps or changes the engine.
        awaited: what a request waits for that is no step: the closed list of :func:`awaited_of`.
    """

    steps: int
    begun: int
    is_inside: bool
    awaited: str | None


def awaited_of(engine: DynamicInferenceEngine) -> str | None:
    """What the requests wait for, if it is something that users have asked for."""
    if engine.is_sleeping:
        return "the engine was put to sleep"
    if engine.suspended:
        return "the engine is paused"
    table = engine.scheduler.table
    if table.unfinished and table.unfinished == table.held and not engine.loop.commands.waiting:
        return "all requests are paused"
    return None


def seen_of(engine: DynamicInferenceEngine) -> Seen:
    """The engine as it is now, by reads of single attributes."""
    counters = engine.counters
    return Seen(
        counters.steps_launched + counters.steps_committed,
        engine.loop.steps_run,
        engine.lock.is_inside,
        awaited_of(engine),
    )


class StallWatch:
    """Looks at an engine now and then.

    Requests stall when they have waited for longer than ``seconds`` in which no step was launched
    or committed, while nothing that they wait for is named. A step that is in progress all the time
    has :data:`STEP_FACTOR` times as long.

    Args:
        clock: seconds that never go back.

    Attributes:
        stalled: why no request goes on; None while they do.
        count: times that it has happened.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stalled: str | None = None
        self.count = 0
        self._seconds = seconds
        self._clock = clock
        self._since = clock()
        self._last = Seen(0, 0, False, None)
        self._was_long = False
        """At the last look the same step was in progress as at the one before."""

    def look(self, waiting: int, seen: Seen) -> None:
        """``waiting`` requests have not ended."""
        now, last = self._clock(), self._last
        is_long = seen.is_inside and last.is_inside and seen.begun == last.begun
        goes_on = seen.steps != last.steps or (self._was_long and not is_long)
        if not waiting or seen.awaited is not None or goes_on:
            self._since = now
        self._last, self._was_long = seen, is_long
        seconds = now - self._since
        if seconds <= self._seconds * (STEP_FACTOR if is_long else 1):
            if self.stalled is not None:
                self.stalled = None
                logger.warning("the engine goes on")
            return
        was_stalled = self.stalled is not None
        if is_long:
            self.stalled = f"a step of the engine has not ended for {seconds:.0f} seconds"
        else:
            self.stalled = (
                f"{waiting} requests wait, and for {seconds:.0f} seconds the engine has taken no "
                "step, for no reason that is known"
            )
        if not was_stalled:
            self.count += 1
            logger.error("%s", self.stalled)
