"""The best of all ranks for each row of a step: how ``peer_best.cu`` is built and called.

In place of two reductions and an all-reduce of NCCL: what ranks that share the vocabulary tell each
other of a row is one number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.compile import Int32, Int64, kernel
from megatron_async.kernels.ranks.peers import Peers

MOST_ROWS = 1024
"""The most rows of a launch, windows counted token by token."""
_CTAS, _THREADS = 32, 256


class PeerBestArguments(NamedTuple):
    """Parameters of ``peer_best.cu``, in order; those of ``peers.py`` follow."""

    packed: Int64
    rows: int
    splits: int
    first_id: int
    received: Int64
    rank: int
    launches: Int32
    best: Int64


def word_count(ranks: int) -> int:
    """int64 of a rank's memory."""
    return 2 * ranks * MOST_ROWS * 2


class PeerBest:
    """The best of the ranks of one group, on one stream. All call it with the same rows in the same
    order.

    Args:
        rank: this one's place in the group.
        memory: int64 ``[word_count]`` of each rank, zeros before the first launch, as this one
            reaches it.
    """

    def __init__(self, rank: int, memory: tuple[Tensor, ...]) -> None:
        self._rank, self._memory, self._device = rank, memory, memory[rank].device
        self._launches = torch.zeros(_CTAS, dtype=torch.int32, device=self._device)
        """The launches of each CTA of the grid, which counts them."""
        kernel("peer_best", self._macros(), self._device)  # compiled before a rank waits

    def takes(self, rows: int) -> bool:
        """Whether ``rows`` rows fit; the same on all ranks."""
        return rows <= MOST_ROWS

    def __call__(self, packed: Tensor, first_id: int) -> Tensor:
        """int64 ``[R]``: the largest of all ranks' ``packed - first_id``.

        Args:
            packed: int64 ``[R, splits]``, contiguous, this rank's.
            first_id: this rank's.
        """
        rows, splits = packed.shape
        best = torch.empty(rows, dtype=torch.int64, device=packed.device)
        if not rows:
            return best
        arguments = PeerBestArguments(
            packed, rows, splits, first_id, self._memory[self._rank], self._rank, self._launches,
            best,
        )  # fmt: skip
        peers = Peers.of(self._memory, self._rank)
        kernel("peer_best", self._macros(), self._device).launch((_CTAS, 1, 1), arguments, peers)
        return best

    def _macros(self) -> dict[str, int]:
        return {
            "RANKS": len(self._memory), "MOST_ROWS": MOST_ROWS, "CTAS": _CTAS, "THREADS": _THREADS,
        }  # fmt: skip
