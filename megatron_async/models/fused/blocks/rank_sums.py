"""Partial sums of several ranks into the residual stream.

Where the ranks reach each other's memory, and rows are few, the kernel that computes partial sums
adds them up, if its CTAs may wait for those of other ranks (``device/waiting_grids.py``), or one
behind it does (``kernels/ranks/peer_sum.py``); else an all-reduce, and the kernel that adds its sum
to the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.kernels.gemm.skinny_gemm import Sending, SkinnyGemm
from megatron_async.kernels.gemm.tile_config import FEW_ROWS, RMS_NORM, padded
from megatron_async.models.fused.blocks.gemms import Work
from megatron_async.models.fused.blocks.residual import AllReduce, Norm, Residual

if TYPE_CHECKING:
    from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords

Agree = Callable[[bool], bool]
"""Whether something holds on all ranks of a group, which all ask at the same place of a step."""

LEAST_SENT_ROWS = 16
"""Padded rows from which on GEMMs send their partial sums themselves, which is quicker at 32 and 64
rows, and at one row not."""
MOST_SUMMED_ROWS = 32
"""Padded rows up to which the kernel that computes partial sums adds them up itself, but for
``skinny_gemm_many.cu``, which sends half the bytes. On two H200 a step of Llama-8B took 2.128 ms
with it and 2.211 without at one row, 2.531 and 2.601 at 32 rows, but 3.118 and 3.07 at 64."""


class RankSums:
    """Adds up over the ranks of one group. All of them choose alike.

    Args:
        all_reduce: over the group.
        words: of the group; None where the ranks do not reach each other's memory.
        agree: whether something holds on all of them; None where they need not ask.
    """

    def __init__(
        self,
        all_reduce: AllReduce,
        words: PeerWords | None,
        hidden_size: int,
        device: torch.device,
        agree: Agree | None = None,
    ) -> None:
        self._all_reduce, self._hidden_size = all_reduce, hidden_size
        self._agree = agree
        self._at_once: dict[SkinnyGemm, bool] = {}
        self._kernel: PeerSum | None = None
        if words is not None:
            from megatron_async.kernels.ranks.peer_sum import PeerSum

            self._kernel = PeerSum(words, hidden_size, device)

    def why_not(self, rows: int) -> str | None:
        """Why the one kernel does not take padded ``rows``; None if it does."""
        if self._kernel is None:
            return "the ranks do not reach each other's memory"
        return self._kernel.why_not(rows)

    @property
    def reaches_peers(self) -> bool:
        """The ranks reach each other's memory."""
        return self._kernel is not None

    def sending(self, rows: int) -> Sending | None:
        """Where the GEMM in front sends padded ``rows``; None where it stores them in
        :meth:`partial`."""
        return None if rows < LEAST_SENT_ROWS else self._words(rows, sums=False)

    def summing(self, rows: int, context: Any, *, bare: bool = False) -> Sending | None:
        """Over whose memory the kernel in front sums padded ``rows`` itself; None where it does
        not.

        Args:
            bare: it sends elements alone, see ``peer_rows.cu``.
        """
        if not context.grids_may_wait:
            return None
        if not bare:
            return None if rows > MOST_SUMMED_ROWS else self._words(rows, sums=True)
        words = None if self._kernel is None else self._kernel.words.of_rows
        size = max(FEW_ROWS, rows) * self._hidden_size
        if words is None or self._hidden_size % 16 or size > words.capacity:
            return None
        return Sending(
            words.memory, words.rank, words.launches, words.capacity, sums=True, bare=True
        )

    def run_at_once(self, gemm: SkinnyGemm) -> bool:
        """Whether the GPUs of all ranks have room for all CTAs of this GEMM at once. How many
        clusters have room may differ between GPUs of one name.

        All ranks ask, and wait for each other the first time, in a step that is not captured.
        """
        if gemm not in self._at_once:
            holds = gemm.runs_at_once
            self._at_once[gemm] = holds if self._agree is None else self._agree(holds)
        return self._at_once[gemm]

    def _words(self, rows: int, *, sums: bool) -> Sending | None:
        kernel = self._kernel
        if kernel is None or self.why_not(rows) is not None or not kernel.takes_sent(rows):
            return None
        words = kernel.words
        return Sending(words.memory, words.rank, words.launches, words.capacity, sums)

    def partial(self, residual: Residual) -> Tensor:
        """bfloat16 ``[R, hidden size]``, where a rank leaves its partial sums."""
        rows, size = residual.hidden.shape
        return residual.workspace.buffer("partial", size)[:rows]

    def add(
        self,
        partial: Tensor | None,
        bias: Tensor | None,
        residual: Residual,
        reader: Norm | None,
        where: int,
    ) -> Tensor | None:
        """``residual += sum of all ranks' partial + bias``; the statistics for the reader.
        ``partial`` is None where it was sent."""
        rows = padded(residual.hidden.shape[0])
        if self._kernel is None or self.why_not(rows) is not None:
            assert partial is not None
            self._all_reduce(partial)
            return residual.add(partial, bias, reader, where)
        statistics = None
        if reader is not None:
            statistics = residual.statistics(where, self._kernel.statistic_rows)
        self._kernel(
            partial, residual.hidden, rows, bias=bias, statistics=statistics,
            scaled=residual.scaled_for(reader),
        )  # fmt: skip
        return statistics

    def work(self, rows: int, reader: Norm | None, *, sent: bool = False) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        if self._kernel is not None and self.why_not(rows) is None:
            kind = 0 if reader is None else 1 if reader.kind == RMS_NORM else 2
            yield self._kernel.work(rows, kind, sent=sent)
