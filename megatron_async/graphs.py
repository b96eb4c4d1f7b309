"""Graphs of a step, one set for each row bucket: S alone, H2D -> F, and all three in one."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from functools import partial

from megatron_async.device.protocol import Device, Graph
from megatron_async.program import StepProgram

CPU_ROW_MULTIPLE = 8
"""Rows and tokens of a forward on the CPU are padded to a multiple of this: the matrix products
then give a row the same bits whatever the other rows are."""


def row_buckets(max_requests: int, *, captures: bool, count: int | None) -> list[int]:
    """Padded row counts in ascending order; the last one holds ``max_requests`` rows.

    With ``captures``: 1, 2, 4, then multiples of 8 up to 64, then of 32; thinned out to at most
    ``count``. Without: multiples of 8.
    """
    if not captures:
        top = -(-max_requests // CPU_ROW_MULTIPLE) * CPU_ROW_MULTIPLE
        return list(range(CPU_ROW_MULTIPLE, top + 1, CPU_ROW_MULTIPLE))
    buckets = [b for b in (1, 2, 4, *range(8, 65, 8)) if b < max_requests]
    buckets += [b for b in range(96, max_requests, 32)]
    buckets.append(max_requests)
    if count is not None and count < len(buckets):
        # Keep the largest, and the rest evenly spread.
        step = len(buckets) / count
        buckets = [buckets[len(buckets) - 1 - int(i * step)] for i in range(count)][::-1]
    return buckets


class StepGraphs:
    """The captured shapes of one :class:`StepProgram`."""

    def __init__(self, device: Device, program: StepProgram, buckets: list[int]) -> None:
        self.buckets = buckets
        self._device = device
        self._program = program
        self._sample: dict[int, Graph] = {}
        self._forward: dict[int, Graph] = {}
        self._step: dict[int, Graph] = {}

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds ``rows`` rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def capture(self) -> Iterator[int]:
        """Capture bucket after bucket, the largest first (it sizes the shared memory pool);
        yields each when it is done. Nothing may be in flight."""
        for rows in reversed(self.buckets):
            capture = self._device.capture
            self._sample[rows] = capture(partial(self._program.sample, rows), "S")
            self._forward[rows] = capture(partial(self._forward_work, rows), "H2D F")
            self._step[rows] = capture(partial(self._step_work, rows), "S H2D F")
            yield rows

    def sample(self, rows: int) -> Graph:
        """S of the pending logits of a forward with this row bucket."""
        return self._sample[rows]

    def forward(self, rows: int) -> Graph:
        """H2D -> F of a decode step."""
        return self._forward[rows]

    def step(self, rows: int) -> Graph:
        """S -> H2D -> F: the full decode iteration, when the bucket is that of the step before."""
        return self._step[rows]

    def _forward_work(self, rows: int) -> None:
        self._program.load_decode(rows)
        self._program.forward_decode(rows)

    def _step_work(self, rows: int) -> None:
        self._program.sample(rows)
        self._forward_work(rows)
