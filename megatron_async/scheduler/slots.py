"""Slots: the stable places of admitted requests in the device-resident arrays."""

from __future__ import annotations

import heapq

from megatron_async.errors import IntegrityError


class SlotTable:
    """Gives out the lowest free slot; ``epochs[slot]`` is the slot's generation.

    The epoch is raised when the slot's request ends, so that rows launched before are dead, while
    the slot itself comes back only after the last ticket that names it has retired.
    """

    def __init__(self, count: int) -> None:
        self.epochs = [0] * count
        self._free = list(range(count))
        self._taken: set[int] = set()

    @property
    def free_count(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot."""
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def end_epoch(self, slot: int) -> None:
        """Rows of ``slot`` launched so far are dead from now on."""
        self.epochs[slot] += 1

    def release(self, slot: int) -> None:
        """``slot`` may be taken again."""
        if slot not in self._taken:
            raise IntegrityError(f"slot {slot} is released although it is free")
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def check(self, holders: list[int]) -> None:
        """Compare with the slots that the scheduler says are held."""
        if sorted(holders) != sorted(self._taken):
            raise IntegrityError(f"slots {sorted(self._taken)} are taken, {sorted(holders)} held")
