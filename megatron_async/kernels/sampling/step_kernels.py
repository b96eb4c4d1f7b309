"""S, H2D and the head of F of a decode step, in the kernels of this folder."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_async.kernels.pdl import uses_pdl
from megatron_async.kernels.sampling.automata import Guides
from megatron_async.kernels.sampling.log_probs import log_probs_and_advance
from megatron_async.kernels.sampling.process_logits import Masks, RowBuffers, process_logits_gpu
from megatron_async.kernels.sampling.sample_triton import sample_shard, sample_splits
from megatron_async.kernels.sampling.step_state import (
    DecodeBatch,
    Ring,
    SequencedRing,
    SlotState,
    begin,
    finish,
)
from megatron_async.kernels.sampling.window_state import (
    SampledWindows,
    begin_windows,
    finish_windows,
)
from megatron_async.sampling.process_logits import Tables
from megatron_async.sampling.sample import SampleInputs, candidates
from megatron_async.sampling.synthetic_acceptance import threshold
from megatron_async.step import packet
from megatron_async.step.records import record_width


class Columns(Protocol):
    """This rank's columns of the logits: ``count`` token ids from ``first_id`` on."""

    first_id: int
    count: int

    def best_of_all(self, packed: torch.Tensor) -> torch.Tensor:
        """``[R, 1]`` of all ranks from this one's ``[R, splits]``, as ``sample_shard`` has it."""


class StepKernels:
    """S, H2D and the head of F in three kernels. An extended S, of rows that ask for more than the
    sampler does, has those of ``process_logits`` and ``log_probs`` besides.

    The reference is the torch code of ``runner.sampling_stage`` and ``runner.step_program``, which
    the CPU runs. ``records`` [max_rows, ROW_WIDTH] int32 is the row map of the last forward until
    :meth:`begin` overwrites it.

    Args:
        extras: what slots ask of an extended S; None if there is none. The results' entries then
            have room for the words of log-probabilities.
        masks: the ring of what guides allow; None if no row is guided.
        window: most tokens that a row may bring; each call says its step's.
        columns: of the logits, where the model has several ranks: :meth:`sample` is then given
            these, of rows without filters, and :meth:`sample_extended` whole rows.
        synthetic_acceptance: the rate at which drafts count as right, for ``bench``.
    """

    def __init__(
        self,
        records: torch.Tensor,
        state: SlotState,
        block_size: int,
        packets: Ring,
        results: SequencedRing,
        extras: Tables | None = None,
        masks: Masks | None = None,
        *,
        window: int = 1,
        columns: Columns | None = None,
        synthetic_acceptance: float | None = None,
    ) -> None:
        self._columns = columns
        self._records = records
        self._state = state
        self._block_size = block_size
        self._packets = packets
        self._results = results
        self._null_slot = len(state.kv_length) - 1
        on = records.device
        self._pdl = uses_pdl(on)
        rows, positions = len(records), len(records) * window
        self._batch = torch.zeros(len(DecodeBatch._fields), positions, dtype=torch.int64, device=on)
        self._accept_below = (
            None if synthetic_acceptance is None else threshold(synthetic_acceptance)
        )
        self._sampled: SampledWindows | None = None
        if window > 1:
            self._sampled = SampledWindows.make(rows, window, on)
        self._extras = extras
        self._masks = masks
        self._buffers: RowBuffers | None = None
        self._guides: Guides | None = None
        if extras is not None and extras.addresses is not None:
            self._guides = Guides(extras.automaton, extras.stops, extras.addresses)
        if extras is not None:
            words = record_width(window, extended=True) * rows
            if results.ring.shape[1] < words:
                raise ValueError(
                    f"extended records of {rows} rows have {words} words; an entry of the results "
                    f"has {results.ring.shape[1]}"
                )
            self._buffers = RowBuffers.make(positions, extras.counts.shape[1], on)

    def sample(self, logits: torch.Tensor, *, window: int = 1) -> None:
        """S of the pending logits [R * window, vocabulary]."""
        records = self._records[: len(logits) // window]
        if self._columns is None:
            best = self._best(candidates(logits), records, window)
        else:
            best = self._best_of_ranks(self._columns, logits, records, window)
        self._finish(best, records, window)

    def sample_extended(
        self, logits: torch.Tensor, sampled: torch.Tensor | None = None, *, window: int = 1
    ) -> None:
        """The same for rows that may have extras: their logits are processed first, and behind the
        record come the words of log-probabilities, [window * LOG_PROB_WORDS, R] int32.

        Args:
            sampled: what is processed and sampled in place of ``logits``, whose log-probabilities
                are the model's.

        Raises:
            ValueError: it was made without ``extras``.
        """
        if self._extras is None or self._buffers is None:
            raise ValueError("there are no tables of extras")
        logits = candidates(logits)
        records = self._records[: len(logits) // window]
        state, results, pdl = self._state, self._results, self._pdl
        processed = process_logits_gpu(
            logits if sampled is None else candidates(sampled), self._extras,
            records[:, packet.ROW_SLOT], state, self._buffers, self._masks, results.counter,
            raw=None if sampled is None else logits, window=window, pdl=pdl,
        )  # fmt: skip
        best = self._best(processed, records, window)
        # What it writes is handed out with the record, and it reads the slots' state before the
        # record's kernel changes it.
        log_probs_and_advance(
            best,
            logits,
            self._extras,
            records,
            state,
            state.finished.view(torch.uint8),
            self._buffers,
            results.ring,
            results.counter,
            record_width(window, extended=False) * len(records),
            window=window,
            accept_below=self._accept_below if window > 1 else None,
            pdl=pdl,
        )
        self._finish(best, records, window, self._guides)

    def begin(self, rows: int, window: int = 1) -> None:
        """H2D and the head of F of a step that decodes in each of ``rows`` rows."""
        records, batch = self._records[:rows], self.batch(rows, window)
        to = (self._state, self._block_size, self._packets, batch)
        if window == 1:
            begin(records, *to, pdl=self._pdl)
        else:
            begin_windows(records, *to, self._null_slot, pdl=self._pdl)

    @property
    def extended_bytes(self) -> int:
        """Device memory of an extended S besides the tables: room for processed logits, mostly."""
        return 0 if self._buffers is None else self._buffers.memory_bytes

    def batch(self, rows: int, window: int = 1) -> DecodeBatch:
        """Return what the last :meth:`begin` of ``rows`` rows filled; the next one overwrites
        it."""
        return DecodeBatch(*self._batch[:, : rows * window])

    def sampled(self, rows: int, window: int) -> SampledWindows:
        """Return what the last S of ``rows`` rows sampled, where rows may bring several tokens; the
        next one overwrites it."""
        assert self._sampled is not None
        slots, tokens, last, first = self._sampled
        tokens = tokens.view(-1)[: rows * window].view(rows, window)
        return SampledWindows(slots[:rows], tokens, last[:rows], first[:rows])

    def _best(self, logits: torch.Tensor, records: torch.Tensor, window: int) -> torch.Tensor:
        slots = records[:, packet.ROW_SLOT]
        return sample_splits(logits, self._inputs(), slots, window=window, pdl=self._pdl)

    def _inputs(self) -> SampleInputs:
        """The inputs of all slots, at the position that each comes to."""
        state = self._state
        return SampleInputs(
            state.inverse_temperature, state.top_k, state.top_p, state.seed, state.kv_length
        )

    def _best_of_ranks(
        self, columns: Columns, logits: torch.Tensor, records: torch.Tensor, window: int
    ) -> torch.Tensor:
        best = sample_shard(
            logits[:, : columns.count], self._inputs(), records[:, packet.ROW_SLOT],
            first_id=columns.first_id, window=window, pdl=self._pdl,
        )  # fmt: skip
        return columns.best_of_all(best)

    def _finish(
        self,
        best: torch.Tensor,
        records: torch.Tensor,
        window: int,
        guides: Guides | None = None,
    ) -> None:
        to = (best, records, self._state, self._results)
        if self._sampled is None:
            finish(*to, guides, pdl=self._pdl)
        else:
            sampled = self.sampled(len(records), window)
            finish_windows(
                *to,
                sampled,
                self._null_slot,
                guides,
                accept_below=self._accept_below,
                pdl=self._pdl,
            )
