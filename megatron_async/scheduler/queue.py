"""The waiting queue, in the order of ranks."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from megatron_async.scheduler.request_state import Sequence


class WaitingQueue:
    """Sequences without slot and blocks, lowest rank first; held ones are passed over."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._items)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in, at its rank."""
        bisect.insort(self._items, (sequence.rank, sequence), key=lambda item: item[0])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = bisect.bisect_left(self._items, sequence.rank, key=lambda item: item[0])
        if index == len(self._items) or self._items[index][1] is not sequence:
            raise ValueError(f"request {sequence.key} is not waiting")
        del self._items[index]

    def head(self) -> Sequence | None:
        """The next to be admitted: the lowest rank that the user has not paused."""
        return next((sequence for sequence in self if not sequence.held), None)
