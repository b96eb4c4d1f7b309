"""Plans as late as the device allows: at depth 1 a request that comes while a step runs is in the
next one.

Without it a step is planned as soon as the one before begins, and what comes meanwhile waits for a
whole step more. Time decides here when the host plans, and never what: commands are applied before
a plan as always, and a run can be replayed by its tickets.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_async.step.plan import Ticket

LEAST_SLACK_NS = 150_000
"""How long before the device's end a launch shall have been made, at least."""
SLACK_SHARE = 0.03
"""The same as a share of the step."""
TOKENS = 64
"""Steps whose prompts' tokens are equal in multiples of this, and whose rows are, cost the same."""
RISE, RETURN = 8, 16
"""A step that took longer counts for one in :data:`RISE`; of a slack that was too large one in
:data:`RETURN` is given up."""

Shape = tuple[int, int, int]


class LatePlanning:
    """Waits before a plan until the oldest step in flight is about to end.

    What steps of each shape take on the device is measured while the engine runs: the time between
    the ends of two that the host waited for. How long before their end the host must begin is found
    from how long it waits behind its launch, its *slack*: too little is made up for at once, too
    much is given up slowly. A shape that the host was too late for is measured anew, and nobody
    waits until then. What samples the tokens of a step comes with the launch behind it, so the host
    waits that long however late it is: where steps became longer by more than the host waited, the
    device had nothing to do, and the wait was that time, on top of which slack is counted.

    Args:
        clock: nanoseconds.
        sleep: seconds.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._costs: dict[Shape, float] = {}
        """Nanoseconds of a step."""
        self._samplings: dict[Shape, float] = {}
        """Nanoseconds that sampling a step's tokens takes, as far as it has made the host late."""
        self._lead: float | None = None
        """Nanoseconds before the device's end at which a plan begins; None before it is known."""
        self._ended: int | None = None
        """When the last step that the host took ended; None if the device waited for the host."""
        self._has_waited = False

    def wait(self, oldest: Ticket) -> None:
        """Return shortly before the oldest step in flight has ended, whose tokens are taken behind
        the next launch; at once if nobody knows when."""
        cost = self._costs.get(_shape(oldest))
        self._has_waited = False
        if cost is None or self._ended is None:
            return
        if self._lead is None:
            self._lead = cost / 2
        seconds = (self._ended + cost - self._lead - self._clock()) * 1e-9
        if seconds > 0:
            self._has_waited = True
            self._sleep(seconds)

    def taken(self, ticket: Ticket, waited: int, *, followed: bool) -> None:
        """The tokens of a ticket have come, behind ``waited`` nanoseconds. ``followed``: another
        step was launched before, so that the device goes on."""
        now, before = self._clock(), self._ended
        shape, has_waited = _shape(ticket), self._has_waited
        self._has_waited = False
        known = self._costs.get(shape)
        slack = max(LEAST_SLACK_NS, SLACK_SHARE * (known or 0.0))
        was_busy = followed and 2 * waited >= LEAST_SLACK_NS
        self._ended = now if was_busy else None
        idle = 0.0
        if was_busy and has_waited and before is not None and known is not None:
            idle = now - before - known
        if idle > waited:
            self._samplings[shape] = waited
        else:
            idle = 0.0
        if followed and has_waited and self._lead is not None:
            missing = slack + self._sampling(shape, waited) + idle - waited
            self._lead += missing if missing > 0 else missing / RETURN
        if has_waited and (idle or not was_busy):
            self._costs.pop(shape, None)
        elif was_busy and before is not None:
            cost = now - before
            known = cost if known is None else known
            self._costs[shape] = min(cost, known + (cost - known) / RISE)

    def _sampling(self, shape: Shape, waited: int) -> float:
        """What is known of :attr:`_samplings`, which is no more than the host has waited."""
        known = self._samplings.get(shape)
        if known is None:
            return 0.0
        if waited < known:
            known = self._samplings[shape] = known + (waited - known) / RETURN
        return known


def _shape(ticket: Ticket) -> Shape:
    """What a step costs is decided by."""
    plan = ticket.plan
    tokens = -(-(plan.num_tokens - plan.decode_rows) // TOKENS)
    return ticket.sampled.rows, plan.window, tokens
