"""The waiting queue, in the order of priority keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

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
        key = sequence.priority_key
        self.items.insert(self._place(key), (key, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = self._place(sequence.priority_key)
        if index == len(self.items) or self.items[index][1] is not sequence:
            raise ValueError(f"request {sequence.key} is not waiting")
        del self.items[index]

    def head(self) -> Sequence | None:
        """The next to be admitted: the lowest key that the user has not paused."""
        for _, sequence in self.items:
            if not sequence.held:
                return sequence
        return None

    def _place(self, key: tuple[int, int]) -> int:
        """Where the sequence with this key is, or would be: no two have the same."""
        items: list[Any] = self.items
        return bisect.bisect_left(items, (key,))
