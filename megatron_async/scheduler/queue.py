"""The waiting queue, in the order of priority keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from megatron_async.scheduler.request_state import Sequence


class WaitingQueue:
    """Sequences without slot and blocks, lowest key first; held ones are passed over."""

    def __init__(self) -> None:
        self.items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self.items)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in, at its place."""
        bisect.insort(self.items, (sequence.priority_key, sequence), key=lambda item: item[0])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = bisect.bisect_left(self.items, sequence.priority_key, key=lambda item: item[0])
        if index == len(self.items) or self.items[index][1] is not sequence:
            raise ValueError(f"request {sequence.key} is not waiting")
        del self.items[index]

    def head(self) -> Sequence | None:
        """The next to be admitted: the lowest key that the user has not paused."""
        return next((sequence for sequence in self if not sequence.held), None)
