"""Things that become reusable when the last forward that could touch them is over."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RetireQueue(Generic[Item]):
    """Items ordered by the ticket whose retirement frees them, then by arrival."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Item]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.heap)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in self.heap)

    def push(self, last_ticket: int, item: Item) -> None:
        """``item`` may be reused once ticket ``last_ticket`` has retired."""
        heapq.heappush(self.heap, (last_ticket, self._arrivals, item))
        self._arrivals += 1

    def retire(self, ticket: int) -> list[Item]:
        """Take out all items whose last ticket is at most ``ticket``."""
        items = []
        while self.heap and self.heap[0][0] <= ticket:
            items.append(heapq.heappop(self.heap)[2])
        return items
