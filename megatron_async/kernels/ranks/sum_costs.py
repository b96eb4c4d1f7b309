"""Sums over ranks in one step or in two: measured once where the ranks of a group meet.

In two steps each rank sends less, and later (``peer_sum.cu``). From how many elements on that is
quicker depends on the GPUs, on what connects them and on how many they are. Two ranks send as much
either way, so nobody measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron_async.device.cuda import no_collection
from megatron_async.device.cuda_timeline import mean_us
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords

HIDDEN_SIZE, ROWS = 4096, (8, 16, 32, 64, 128)
"""Sums that are measured. Of other hidden sizes the elements count."""
CALLS, REPLAYS, ROUNDS = 20, 2, 3
"""Sums of a graph, replays of which a mean is taken, and means of which the least counts."""
SENT_SAVES_US = 1.2
"""What a sum takes less where the GEMM in front sends its partial sums, or adds them up: it does so
in one step alone. Measured on two H200, at 1 to 64 rows of 4,096: 1.1 to 1.5 us."""
_RMS_STATISTICS = 1


class SumCost(NamedTuple):
    """Microseconds of a sum of stored partial sums, with the statistics of an RMSNorm."""

    elements: int
    one_us: float
    two_us: float


def two_steps_from(costs: Sequence[SumCost]) -> int | None:
    """Return the elements from which on sums have two steps: the fewest from which on these are
    quicker at all sizes that were measured. None for one step always."""
    found = None
    for cost in sorted(costs, reverse=True):
        if cost.two_us + SENT_SAVES_US >= cost.one_us:
            break
        found = cost.elements
    return found


def shown(costs: Sequence[SumCost]) -> str:
    """Costs and choice in a line."""
    sizes = ", ".join(
        f"{cost.elements // HIDDEN_SIZE}: {cost.one_us:.1f} and {cost.two_us:.1f}" for cost in costs
    )
    least = two_steps_from(costs)
    chosen = "one step always" if least is None else f"two steps from {least} elements on"
    return f"us in one step and in two, by rows of {HIDDEN_SIZE}: {sizes}; {chosen}"


class TimedSums:
    """Sums of zeros over the ranks of a group, all of them loaded, and none launched yet.

    All ranks make one, and when all have, call :meth:`costs`.

    Args:
        words: of the group. Their launches are counted on.

    Raises:
        ConfigError: a kernel does not compile.
    """

    def __init__(self, words: PeerWords, device: torch.device) -> None:
        ways = [PeerSum(words, HIDDEN_SIZE, device, steps=steps) for steps in (1, 2)]
        self._rows = [rows for rows in ROWS if ways[0].why_not(rows) is None]
        work = [way.work(rows, _RMS_STATISTICS) for rows in self._rows for way in ways]
        cuda.compile_together(work, cuda.architecture(device.index or 0))
        most = max(self._rows, default=0)
        of = {"device": device, "dtype": torch.bfloat16}
        self._partial, self._hidden, self._scaled = (
            torch.zeros(most, HIDDEN_SIZE, **of)  # type: ignore[call-overload]
            for _ in range(3)
        )
        self._weight = torch.zeros(HIDDEN_SIZE, **of)  # type: ignore[call-overload]
        tiles = HIDDEN_SIZE // ways[0].statistic_rows
        self._statistics = torch.zeros(most, tiles, 2, device=device)
        for rows in self._rows:
            for way in ways:
                way.load(rows, _RMS_STATISTICS)
        self._graphs = [
            [_Graph(partial(self._add_up, way, rows), device) for way in ways]
            for rows in self._rows
        ]

    def costs(self) -> list[SumCost]:
        """What sums take, by their elements. Waits for them, and so for all ranks."""
        found = []
        for rows, graphs in zip(self._rows, self._graphs, strict=True):
            rounds = [[graph.us() for graph in graphs] for _ in range(ROUNDS)]
            found.append(SumCost(rows * HIDDEN_SIZE, *map(min, zip(*rounds, strict=True))))
        return found

    def _add_up(self, way: PeerSum, rows: int) -> None:
        way(
            self._partial[:rows], self._hidden[:rows], rows, statistics=self._statistics[:rows],
            scaled=(self._weight, self._scaled[:rows]),
        )  # fmt: skip


class _Graph:
    """A sum, captured several times in a row."""

    def __init__(self, add_up: Callable[[], None], device: torch.device) -> None:
        self._stream, self._graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with no_collection(), torch.cuda.stream(self._stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(CALLS):
                add_up()
            self._graph.capture_end()

    def us(self) -> float:
        """Microseconds of a sum. Behind the first replay all ranks are equally far."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            return mean_us(self._graph.replay, REPLAYS) / CALLS
