"""Sums over the ranks of a group of many rows, and the norm behind them: how ``peer_rows.cu`` is
built and called.

Where ``peer_sum.py`` sends each element with as much again to tell that it is there, this sends the
elements alone: half the bytes, which are most of the time from some 64 rows on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.compile import Bf16, Int32, Int64, kernel
from megatron_async.kernels.ranks.peers import Peers

CTAS = 128
"""Size of the grid, each of which has a row at a time."""
LEAST_ROWS, MOST_ROWS = 65, 512
"""Rows of a sum. For fewer ``peer_sum.py`` is there."""
MOST_RANKS = 4
"""The most ranks of a group. With more each would send too much to all others."""
_MOST_SENT = 512 * 4096
"""Elements that a rank sends in a launch, to all others together."""
_ALIGNMENT = 256
_LEAST_NORM, _MOST_SIZE = 256, 8192
"""Elements of a row: the fewest of which Triton's norm gives a thread eight at a time, and the
most."""


class PeerRowsArguments(NamedTuple):
    """Parameters of ``peer_rows.cu``, in order; those of ``peers.py`` follow."""

    partial: Bf16
    received: Int64
    rank: int
    rows: int
    launches: Int32
    bias: Bf16 | None
    residual: Bf16 | None
    weight: Bf16 | None
    offset: float
    columns: float
    eps: float
    total: Bf16
    normed: Bf16 | None


class RowWords(NamedTuple):
    """Where the ranks of a group send each other partial sums. All zeros before the first launch,
    and after each.

    Args:
        rank: this one's place in the group.
        memory: int64 ``[word_count]`` of each rank, as this one reaches it: of its own what it
            gets.
        launches: int32, one for each CTA of any grid that sends to the words, see
            ``peer_words.cuh``.
        capacity: elements that a rank can send to another in a launch.
    """

    rank: int
    memory: tuple[Tensor, ...]
    launches: Tensor
    capacity: int

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return len(self.memory)


def capacity_of(ranks: int) -> int:
    """Return the elements that each of ``ranks`` ranks can send to another in a launch; 0 if there
    are too many ranks."""
    if ranks > MOST_RANKS:
        return 0
    return _MOST_SENT // (ranks - 1) // _ALIGNMENT * _ALIGNMENT


def word_count(ranks: int, capacity: int) -> int:
    """Return the int64 of a rank's memory, for ``capacity`` elements that each rank sends."""
    if capacity % _ALIGNMENT:
        raise ValueError(f"capacity {capacity} must be a multiple of {_ALIGNMENT}")
    return 2 * ranks * capacity // 4


def why_not(hidden_size: int, rows: int, words: RowWords) -> str | None:
    """Why the kernel does not add up ``rows`` rows; None if it does."""
    if hidden_size % 8 or hidden_size > _MOST_SIZE:
        return f"a hidden size of {hidden_size} is not a multiple of 8 up to {_MOST_SIZE}"
    if rows > MOST_ROWS or rows * hidden_size > words.capacity:
        return f"{rows} rows of {hidden_size} are more than ranks send each other in a kernel"
    return None


class PeerRows:
    """Sums over the ranks of one group, of rows of one size, on one stream.

    All ranks call it with the same rows in the same order.

    Args:
        ctas: of the grid, the same on all ranks.

    Attributes:
        words: what it was made with.
    """

    def __init__(
        self, words: RowWords, hidden_size: int, device: torch.device, ctas: int = CTAS
    ) -> None:
        self.words = words
        self._hidden_size, self._device = hidden_size, device
        self._ctas = ctas

    def why_not(self, rows: int) -> str | None:
        """Why it does not add up ``rows`` rows; None if it does."""
        return why_not(self._hidden_size, rows, self.words)

    @property
    def norms(self) -> bool:
        """Whether :meth:`add_norm` has the bits of ``norm/add_norm.py``."""
        return self._hidden_size >= _LEAST_NORM and self._hidden_size % 16 == 0

    def work(self, rows: int, *, norm: bool) -> tuple[str, dict[str, int]]:
        """Source and macros for ``rows``, see ``peer_rows.cu``."""
        own = max(1, -(-rows // self._ctas))
        macros = {
            "H": self._hidden_size, "OWN": _power_of_two(own), "RANKS": self.words.ranks,
            "CAPACITY": self.words.capacity, "CTAS": self._ctas,
            "LAUNCHES": len(self.words.launches), "THREADS": threads_of(self._hidden_size),
            "NORM": int(norm),
        }  # fmt: skip
        return "peer_rows", macros

    def sum_(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' ``partial``, in its place: bfloat16 ``[R, H]``, contiguous, rounded
        once, the same bits on all ranks."""
        self._launch(partial, partial, norm=False)
        return partial

    def add_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """``hidden = sum + bias + residual``, where the sum is :meth:`sum_`'s, and its RMSNorm.

        Args:
            partial: bfloat16 ``[R, H]``, contiguous, this rank's.
            residual: bfloat16 ``[R, H]``, contiguous, the same on all ranks.
            weight: ``[H]``, of the norm; ``offset`` is added to it in fp32.
            bias: ``[H]``, of the sum.

        Returns:
            ``hidden`` and the normed ``hidden``, bfloat16 ``[R, H]``, with the bits of
            :func:`~megatron_async.kernels.norm.add_norm.add_norm` behind :meth:`sum_`.
        """
        normed = torch.empty_like(partial)
        hidden = torch.empty_like(partial)
        self._launch(
            partial, hidden, norm=True, bias=bias, residual=residual, weight=weight,
            offset=offset, eps=eps, normed=normed,
        )  # fmt: skip
        return hidden, normed

    def _launch(
        self,
        partial: Tensor,
        total: Tensor,
        *,
        norm: bool,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        offset: float = 0.0,
        eps: float = 0.0,
        normed: Tensor | None = None,
    ) -> None:
        words, memory = self.words, self.words.memory
        rows = partial.shape[0]
        arguments = PeerRowsArguments(
            partial, memory[words.rank], words.rank, rows, words.launches, bias, residual, weight,
            float(offset), float(self._hidden_size), float(eps), total, normed,
        )  # fmt: skip
        peers = Peers.of(memory, words.rank)
        source, macros = self.work(rows, norm=norm)
        kernel(source, macros, self._device).launch((self._ctas, 1, 1), arguments, peers)


def threads_of(hidden_size: int) -> int:
    """Return the threads of a row: those that it has in ``norm/add_norm.py``."""
    return 32 * max(1, min(16, _power_of_two(hidden_size) // 512))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
