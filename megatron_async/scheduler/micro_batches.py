"""Micro-batches: of a model in pipeline stages, the parts of the running requests that are planned
in turns, so that each stage has one to compute."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.request_table import RequestTable

MOST_TIMES = 2
"""A micro-batch of more than this many times the requests of the smallest one gives some away."""


class MicroBatches:
    """Divides requests among micro-batches, numbered from 0. A request joins one when it is
    admitted. What is decided follows from the requests' states alone.
    """

    def __init__(self, table: RequestTable, limits: Limits) -> None:
        self._turn = 0
        self._table = table
        self._limits = limits
        self._count = limits.micro_batches

    def __iter__(self) -> Iterator[int]:
        """Each once, to be planned until one has rows; the one behind it is the next time's
        first."""
        for _ in range(self._count):
            now, self._turn = self._turn, (self._turn + 1) % self._count
            self._level(now)
            yield now

    def others(self) -> int:
        """How many have rows to launch, less the one whose turn it is."""
        return max(sum(size > 0 for size in self._sizes()) - 1, 0)

    def admits(self, micro_batch: int) -> bool:
        """Whether a waiting request may join: one that has its share of all that are to run leaves
        it to the others."""
        sizes = self._sizes()
        wanted = min(sum(sizes) + len(self._table.waiting), self._limits.max_requests)
        return sizes[micro_batch] < -(-wanted // self._count)

    def _level(self, micro_batch: int) -> None:
        """Level a micro-batch before it is planned: one that has grown far beyond the smallest one
        gives its newest requests away. They miss this step, and go on in the smallest one's next,
        when their last tokens have been sampled."""
        sizes = self._sizes()
        least = min(sizes)
        surplus = sizes[micro_batch] - least
        if surplus < 2 or sizes[micro_batch] <= MOST_TIMES * least:
            return
        decoding = self._table.decoding[micro_batch].values()
        for sequence in list(decoding)[-(surplus // 2) :]:
            self._table.move(sequence, sizes.index(least))

    def _sizes(self) -> list[int]:
        """Count for each the requests that have rows in its steps."""
        sizes = [len(decoding) for decoding in self._table.decoding]
        for sequence in self._table.prefilling:
            sizes[sequence.micro_batch] += 1
        return sizes
