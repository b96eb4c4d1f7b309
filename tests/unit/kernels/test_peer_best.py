"""The best of all ranks for each row, over each other's memory.

As in ``test_peer_sum.py`` the ranks are of one process, and in the emulator their launches run as
one grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.ranks import peer_best
from megatron_async.kernels.ranks.peer_best import PeerBest, word_count
from tests.support.cuda_kernels import device, on_both

__all__ = ["device"]

SMALL = {"_CTAS": 2, "_THREADS": 32, "MOST_ROWS": 8}


class Group:
    """All ranks, each with a stream of its own."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        memory = tuple(
            torch.zeros(word_count(ranks), dtype=torch.int64, device=device) for _ in range(ranks)
        )
        self.device = device
        self.ranks = [PeerBest(rank, memory) for rank in range(ranks)]
        self.streams: list[Any] = [None] * ranks
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def check(self, rows: int, splits: int) -> None:
        """All ranks have what torch finds."""
        packed = [
            torch.randint(-(2**62), 2**62, (rows, splits), device=self.device) for _ in self.ranks
        ]
        ids = [1000 * rank for rank in range(len(self.ranks))]
        found = self.each(lambda rank: self.ranks[rank](packed[rank], ids[rank]))
        each = [part.amax(1) - first for part, first in zip(packed, ids, strict=True)]
        wanted = torch.stack(each).amax(0)
        assert all(best.equal(wanted) for best in found)

    def each(self, call: Callable[[int], Tensor]) -> list[Tensor]:
        found = []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(call(rank))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return found


@pytest.fixture
def small(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        for name, value in SMALL.items():
            monkeypatch.setattr(peer_best, name, value)


@on_both(
    *("ranks", "steps"),
    gpu=[(2, [(1, 64), (256, 4), (33, 1), (700, 3), (1, 300)]), (8, [(5, 40), (1, 1)])],
    small=[(2, [(1, 40), (8, 3), (2, 1), (5, 33), (8, 70)]), (3, [(3, 2), (1, 1), (8, 4)])],
)
@pytest.mark.usefixtures("small")
def test_all_ranks_have_the_best(
    device: torch.device, ranks: int, steps: list[tuple[int, int]]
) -> None:
    """Launches of other numbers of rows follow each other, so halves hold words of older ones."""
    torch.manual_seed(ranks)
    group = Group(ranks, device)
    for rows, splits in [*steps, *steps]:
        group.check(rows, splits)


@on_both(gpu=[()], small=[()])
@pytest.mark.usefixtures("small")
def test_launches_count_on_past_the_largest_number(device: torch.device) -> None:
    """0 is the number of words that nobody has sent."""
    group = Group(2, device)
    for each in group.ranks:
        each._launches.fill_(-2)
    for rows in (1, 4, 4, 4):
        group.check(rows, 2)
    assert all((each._launches == 4).all() for each in group.ranks)


@on_both(gpu=[()], small=[()])
@pytest.mark.usefixtures("small")
def test_more_rows_than_fit_are_not_taken(device: torch.device) -> None:
    best = Group(2, device).ranks[0]
    assert best.takes(peer_best.MOST_ROWS) and not best.takes(peer_best.MOST_ROWS + 1)
    assert best(torch.empty(0, 3, dtype=torch.int64, device=device), 0).shape == (0,)
