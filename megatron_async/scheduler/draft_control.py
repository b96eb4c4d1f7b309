"""How many drafts are worth their step: the window of the next step, from what steps cost and how
many drafts were accepted.

The costs are constants of a run: given, or measured when the engine was built. Acceptance is what
committed tickets brought since the last new weights. So the windows of a run depend on commands and
ticket numbers, as all else.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from megatron_async.step.plan import Plan
from megatron_async.step.records import RUNNING, StepResult

DECAY = 31 / 32
"""What a committed ticket leaves of the weight of those before it."""
PRIOR, PRIOR_WEIGHT = 0.8, 2.0
"""Acceptance before anything is known, and how many drafts of the first ticket it counts for."""
LEAST_GAIN = 1.02
"""Another window than the last one must bring this many times the tokens a second."""
TRIAL_TICKETS = 8
"""For this many steps the largest window is tried again."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Tickets before the first trial; each that fails doubles them."""
FADE = 0.25
"""What a trial leaves of the weight of what was known of the drafts that it tries."""


class WindowReason(str, Enum):
    """Why a step has the window that it has."""

    NO_DRAFTS = "no row drafts"
    ALL_DRAFTS = "all drafts that a row wants"
    FEWER_PAY = "fewer drafts bring more tokens a second"
    TRIAL = "trial: acceptance may have risen"


class WindowChoice(NamedTuple):
    """The window of a step."""

    window: int
    reason: WindowReason


NOTHING_DRAFTED = WindowChoice(1, WindowReason.NO_DRAFTS)


class StepCosts:
    """Seconds of a decode step by rows and window.

    Args:
        seconds: by (rows, window), for each of ``windows`` at each number of rows.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float], windows: tuple[int, ...]) -> None:
        self._rows = sorted({rows for rows, _ in seconds})
        self._costs = [{window: seconds[rows, window] for window in windows} for rows in self._rows]

    @classmethod
    def constant(cls, draft: float, windows: tuple[int, ...]) -> StepCosts:
        """Costs of which nothing is measured: each draft of a row adds the share ``draft`` of a
        step without drafts, whatever the number of rows."""
        return cls({(1, window): 1 + draft * (window - 1) for window in windows}, windows)

    def of(self, rows: int) -> dict[int, float]:
        """The costs by window of the smallest measured step that holds ``rows`` rows, or of the
        largest one."""
        index = bisect.bisect_left(self._rows, rows)
        return self._costs[min(index, len(self._costs) - 1)]


class DraftControl:
    """Chooses the window of each step among ``windows``, ascending from 1.

    It takes the one that brings the most tokens a second: with the probability a(j) that draft j is
    accepted if those before it were, a row brings 1 + a(1) + a(1) a(2) + ... tokens. Drafts that
    smaller windows leave out are tried now and then, more and more seldom.

    Args:
        costs: None takes all drafts that a row wants.
    """

    def __init__(self, windows: tuple[int, ...], costs: StepCosts | None) -> None:
        self._windows = windows
        self._costs = costs
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what is known of drafts, as at the start: those to come are made and verified by
        new weights."""
        windows = self._windows
        drafts = windows[-1] - 1
        self._verified = [PRIOR_WEIGHT] * drafts
        self._accepted = [PRIOR * PRIOR_WEIGHT] * drafts
        self._last = windows[-1]
        self._pause = FIRST_PAUSE
        self._trial: int | None = None
        """First ticket of the next trial, or of this one; None while the window is the largest."""
        self._has_faded = False
        """This trial has made what was known count for less."""

    @property
    def acceptance(self) -> list[float]:
        """The probability of each draft, by its place, to be accepted if those before it were."""
        counts = zip(self._accepted, self._verified, strict=True)
        return [accepted / verified for accepted, verified in counts]

    def holding(self, window: int) -> int:
        """The smallest window that holds ``window`` tokens."""
        return self._windows[bisect.bisect_left(self._windows, window)]

    def committed(self, plan: Plan, result: StepResult) -> None:
        """Take what the decode rows of a ticket have brought, in the order of tickets."""
        if self._costs is None or plan.window == 1:
            return
        drafts = plan.window - 1
        verified, accepted = [0] * drafts, [0] * drafts
        rows = zip(plan.rows.windows, result.counts, result.statuses, strict=True)
        for window, count, status in rows:
            # A row that has ended says nothing of the drafts behind its end.
            if status != RUNNING or not count:
                continue
            for draft in range(min(count, window - 1)):
                verified[draft] += 1
                accepted[draft] += draft + 1 < count
        for draft in range(drafts):
            if verified[draft]:
                self._verified[draft] = DECAY * self._verified[draft] + verified[draft]
                self._accepted[draft] = DECAY * self._accepted[draft] + accepted[draft]

    def choose(self, number: int, wanted: Iterable[int]) -> WindowChoice:
        """The window of step ``number``, whose decode rows want to bring ``wanted`` tokens."""
        if self._costs is None:
            largest = self.holding(max(wanted, default=1))
            return (
                NOTHING_DRAFTED if largest == 1 else WindowChoice(largest, WindowReason.ALL_DRAFTS)
            )
        rows = Counter(wanted)
        largest = self.holding(max(rows, default=1))
        if largest == 1:
            return NOTHING_DRAFTED
        if self._trial is not None and self._trial <= number < self._trial + TRIAL_TICKETS:
            if not self._has_faded:
                self._has_faded = True
                self._fade()
            return WindowChoice(largest, WindowReason.TRIAL)
        best = self._best(rows, largest, self._costs.of(rows.total()))
        if best == largest:
            self._trial, self._pause = None, FIRST_PAUSE
            return WindowChoice(best, WindowReason.ALL_DRAFTS)
        if self._trial is None:
            self._trial, self._has_faded = number + self._pause, False
        elif number >= self._trial + TRIAL_TICKETS:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._trial, self._has_faded = number + self._pause, False
        return WindowChoice(best, WindowReason.FEWER_PAY)

    def _best(self, rows: Mapping[int, int], largest: int, costs: Mapping[int, float]) -> int:
        """The window with the most tokens a second."""
        reached, tokens = 1.0, [0.0, 1.0]
        for probability in self.acceptance:
            reached *= probability
            tokens.append(tokens[-1] + reached)
        rates = {
            window: sum(count * tokens[min(window, own)] for own, count in rows.items())
            / costs[window]
            for window in self._windows
            if window <= largest
        }
        best = max(rates, key=lambda window: rates[window])
        last = min(self._last, largest)
        self._last = best if rates[best] > LEAST_GAIN * rates[last] else last
        return self._last

    def _fade(self) -> None:
        """What a trial brings of drafts that were left out is to count for more than what was
        before."""
        for draft in range(self._last - 1, len(self._verified)):
            self._verified[draft] *= FADE
            self._accepted[draft] *= FADE
