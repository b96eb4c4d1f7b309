"""Which states of the device's pool of token automata belong to which grammar. Pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from megatron_async.errors import IntegrityError
from megatron_async.step.extras import DEAD_STATE


class Place(NamedTuple):
    """Where the states of a grammar begin in the pool. ``is_new``: they are not there yet."""

    base: int
    is_new: bool


class AutomatonSpace:
    """States of a pool, given to grammars by number.

    A grammar keeps its states while somebody holds it, and behind that until another one needs the
    room: the one that was given back first goes first. A request holds its grammar from the
    admission to a slot until the last ticket that names the slot has retired, so no launch in
    flight or to come reads what is given to another.

    Args:
        capacity: states, that nobody's included.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [(DEAD_STATE + 1, capacity)] if capacity > DEAD_STATE + 1 else []
        """Ranges from a state to another, without it, ascending; no two of them touch."""
        self._ranges: dict[int, tuple[int, int]] = {}
        """By grammar."""
        self._holders: dict[int, int] = {}
        """By grammar, how many; none has 0."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Grammars that nobody holds, in the order in which they were given back."""

    def take(self, number: int, states: int) -> Place | None:
        """Hold ``states`` states for grammar ``number`` once more; None if there is no room."""
        held = self._ranges.get(number)
        if held is not None:
            self._idle.pop(number, None)
            self._holders[number] = self._holders.get(number, 0) + 1
            return Place(held[0], is_new=False)
        if self._gap(states) is None and self._most_room() < states:
            return None
        while (at := self._gap(states)) is None:
            self._drop(next(iter(self._idle)))
        start, end = self._free[at]
        self._free[at : at + 1] = [(start + states, end)] if start + states < end else []
        self._ranges[number] = (start, start + states)
        self._holders[number] = 1
        return Place(start, is_new=True)

    def give_back(self, number: int) -> None:
        """One holder of a grammar less."""
        left = self._holders[number] - 1
        if left:
            self._holders[number] = left
        else:
            del self._holders[number]
            self._idle[number] = None

    def check(self, holders: dict[int, int]) -> None:
        """Check that each grammar is held by exactly those that say so, by number, and that ranges
        are nobody else's.

        Raises:
            IntegrityError: they are not.
        """
        if holders != self._holders:
            raise IntegrityError(f"automata are held by {self._holders}, counted {holders}")
        ranges = sorted([*self._ranges.values(), *self._free])
        ends = [DEAD_STATE + 1, *(end for _, end in ranges)]
        if [start for start, _ in ranges] != ends[:-1] or ends[-1] != max(self.capacity, 1):
            raise IntegrityError(f"ranges of automata overlap or are lost: {ranges}")

    def _gap(self, states: int) -> int | None:
        """The first free range that holds ``states``."""
        for at, (start, end) in enumerate(self._free):
            if end - start >= states:
                return at
        return None

    def _most_room(self) -> int:
        """States of the largest range without those that somebody holds."""
        most, start = 0, DEAD_STATE + 1
        for first, end in sorted(self._ranges[number] for number in self._holders):
            most, start = max(most, first - start), end
        return max(most, self.capacity - start)

    def _drop(self, number: int) -> None:
        """Make the states of a grammar free, and one range of those that touch."""
        del self._idle[number]
        self._free = sorted([*self._free, self._ranges.pop(number)])
        joined: list[tuple[int, int]] = []
        for start, end in self._free:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self._free = joined
