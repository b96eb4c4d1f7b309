"""The waiting queue, in the order of priority keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import itemgetter

from megatron_async.scheduler.request_state import Sequence

KEY = itemgetter(0)


class WaitingQueue:
    """Sequences without slot and blocks, lowest key first; held ones are passed over.

    Args:
        long_tokens: those with more tokens are long, and may be passed over by others; None has no
            long ones.
    """

    def __init__(self, long_tokens: int | None = None) -> None:
        self.items: list[tuple[tuple[int, int], Sequence]] = []
        self._long_tokens = long_tokens
        self._short: list[tuple[tuple[int, int], Sequence]] = []
        """Entries of sequences that were not long when they came; their keys are below."""
        self._short_keys: set[int] = set()

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self.items)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in, at its place."""
        entry = sequence.priority_key, sequence
        bisect.insort(self.items, entry, key=KEY)
        if self._long_tokens is not None and not self.is_long(sequence):
            bisect.insort(self._short, entry, key=KEY)
            self._short_keys.add(sequence.key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        _remove(self.items, sequence)
        if sequence.key in self._short_keys:  # it may have lost tokens since, and be short now
            _remove(self._short, sequence)
            self._short_keys.remove(sequence.key)

    def head(self, *, long: bool = True) -> Sequence | None:
        """The next to be admitted: the lowest key that the user has not paused, or without ``long``
        the lowest of those that are not long."""
        for _, sequence in self.items if long else self._short:
            if not sequence.held:
                return sequence
        return None

    def is_long(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is."""
        return self._long_tokens is not None and len(sequence.tokens) > self._long_tokens


def _remove(items: list[tuple[tuple[int, int], Sequence]], sequence: Sequence) -> None:
    index = bisect.bisect_left(items, sequence.priority_key, key=KEY)  # no two have the same
    if index == len(items) or items[index][1] is not sequence:
        raise ValueError(f"request {sequence.key} is not waiting")
    del items[index]
