"""Partial sums of the ranks of a group into the residual stream: how ``peer_sum.cu`` is built and
called.

In place of an all-reduce and the kernel that adds its sum to the stream: each rank writes its
partial sums into the others' memory and adds up what it finds in its own. For few rows the latency
of an all-reduce is nearly all of its time; here it is one write over NVLink.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import Bf16, Fp32, Int32, Int64, kernel
from megatron_async.kernels.ranks.peer_best import PeerBest
from megatron_async.kernels.ranks.peer_rows import RowWords
from megatron_async.kernels.ranks.peers import Peers

CTAS, THREADS = 128, 128
"""Size of the grid: at 8 elements of each thread, 32 rows of 4,096 at once."""
LAUNCHES = 1024
"""Entries that count the launches: grids that send have at most as many CTAs."""
_TILES = (256, 128, 64)
ALIGNMENT = 256
"""Elements of a warp."""


class PeerSumArguments(NamedTuple):
    """Parameters of ``peer_sum.cu``, in order; those of ``peers.py`` follow."""

    partial: Bf16 | None
    received: Int64
    rank: int
    rows: int
    launches: Int32
    bias: Bf16 | None
    hidden: Bf16
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None


class PeerWords(NamedTuple):
    """Where the ranks of a group send each other words. All zeros before the first launch.

    Args:
        rank: this one's place in the group.
        memory: int64 of each rank, as this one reaches it: of its own what it gets.
        launches: int32, one for each CTA of any grid that sends to the words, see
            ``peer_words.cuh``.
        capacity: elements that a rank can send in a launch, see :func:`word_count`.
        best: finds the best of the same ranks; None where there are no words for it.
        of_rows: words of sums of many rows; None where there are none.
        two_steps_from: elements of a sum from which on it has two steps, the same on all ranks, see
            ``sum_costs.py``; None for one step always.
    """

    rank: int
    memory: tuple[Tensor, ...]
    launches: Tensor
    capacity: int
    best: PeerBest | None = None
    of_rows: RowWords | None = None
    two_steps_from: int | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return len(self.memory)


def word_count(ranks: int, capacity: int) -> int:
    """Return the words of a rank's memory, for ``capacity`` elements that each rank sends."""
    if capacity % ALIGNMENT:
        raise ValueError(f"capacity {capacity} must be a multiple of {ALIGNMENT}")
    return 2 * ranks * capacity // 2


def why_not(hidden_size: int, rows: int, words: PeerWords) -> str | None:
    """Why the kernel does not add up ``rows`` rows; None if it does."""
    if hidden_size % _TILES[-1]:
        return f"a hidden size of {hidden_size} is not a multiple of {_TILES[-1]}"
    if -(-rows * hidden_size // ALIGNMENT) * ALIGNMENT > words.capacity:
        return f"{rows} rows of {hidden_size} are more than ranks send each other in a kernel"
    return None


class PeerSum:
    """Sums over the ranks of one group, of rows of one size, on one stream.

    All ranks call it with the same rows in the same order.

    Args:
        threads: of a CTA.
        steps: 1 or 2; None takes those that the words say.
        ctas: of the grid, the same on all ranks; None for :data:`CTAS`.

    Attributes:
        words: what it was made with.
        statistic_rows: elements that one partial statistic covers; 0 of a hidden size that it does
            not take, see :func:`why_not`.
    """

    def __init__(
        self,
        words: PeerWords,
        hidden_size: int,
        device: torch.device,
        threads: int = THREADS,
        steps: int | None = None,
        ctas: int | None = None,
    ) -> None:
        self.words = words
        self._hidden_size, self._device = hidden_size, device
        self._steps = steps
        self._ctas, self._threads = ctas or CTAS, threads
        self.statistic_rows = next((tile for tile in _TILES if hidden_size % tile == 0), 0)

    def why_not(self, rows: int) -> str | None:
        """Why it does not add up ``rows`` rows; None if it does."""
        return why_not(self._hidden_size, rows, self.words)

    def takes_sent(self, rows: int) -> bool:
        """Whether GEMMs may send what it adds up of padded ``rows``."""
        elements = -(-rows // 8) * 8 * self._hidden_size
        if self.steps(rows) == 2:
            return False
        return self._hidden_size % 16 == 0 and elements <= self.words.capacity

    def steps(self, rows: int) -> int:
        """The steps of a sum of padded ``rows``: in two each rank sends less, and later. The bits
        are the same."""
        least = self.words.two_steps_from
        in_two = least is not None and rows * self._hidden_size >= least
        return self._steps or (2 if in_two else 1)

    def load(self, rows: int, statistics: int) -> None:
        """Have the kernel of :meth:`work`, so that a launch waits for no compiler."""
        kernel(*self.work(rows, statistics), self._device)

    def work(self, rows: int, statistics: int, *, sent: bool = False) -> tuple[str, dict[str, int]]:
        """Source and macros for padded ``rows``, see ``peer_sum.cu``."""
        macros = {
            "H": self._hidden_size, "MOST_ROWS": rows, "RANKS": self.words.ranks,
            "CAPACITY": self.words.capacity, "LAUNCHES": len(self.words.launches),
            "CTAS": self._ctas, "THREADS": self._threads, "TILE": self.statistic_rows,
            "STATS": statistics, "STEPS": self.steps(rows), "SENT": int(sent),
        }  # fmt: skip
        return "peer_sum", macros

    def __call__(
        self,
        partial: Tensor | None,
        hidden: Tensor,
        most_rows: int,
        *,
        bias: Tensor | None = None,
        statistics: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """``hidden += sum of all ranks' partial + bias``, rounded once, the same bits on all ranks.

        Args:
            partial: bfloat16 ``[R, H]``, contiguous, this rank's. None where the GEMM in front has
                sent all ranks', see ``SkinnyGemm``.
            hidden: bfloat16 ``[R, H]``, contiguous, the same on all ranks.
            most_rows: padded ``R``.
            bias: bfloat16 ``[H]``, the same on all ranks.
            statistics: fp32 ``[R, H / statistic_rows, 2]``, overwritten; with ``scaled`` for an
                RMSNorm, else for a LayerNorm. None computes none.
            scaled: the weight ``[H]`` of the RMSNorm that comes next, and where ``hidden`` times it
                goes.
        """
        words, memory = self.words, self.words.memory
        next_weight, scaled_out = (None, None) if scaled is None else scaled
        arguments = PeerSumArguments(
            partial, memory[words.rank], words.rank, hidden.shape[0], words.launches, bias, hidden,
            next_weight, scaled_out, statistics,
        )  # fmt: skip
        peers = Peers.of(memory, words.rank)
        kind = 0 if statistics is None else 1 if scaled is not None else 2
        source, macros = self.work(most_rows, kind, sent=partial is None)
        kernel(source, macros, self._device).launch((self._ctas, 1, 1), arguments, peers)


def runs_on(device: torch.device) -> str | None:
    """Why the kernel does not run on a device; None if it does."""
    if device.type != "cuda":
        return "ranks of a CPU have no memory that the others write to"
    return cuda.unavailable(device.index or 0)
