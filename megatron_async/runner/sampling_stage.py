"""S: samples pending logits, finds the ends that the device can see, and hands out records.

On CUDA the kernels of ``kernels/sampling`` do the same; this is their reference, which can run
there too. Of several pipeline stages the last one samples, and the others take what it has sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from megatron_async.device.cuda import CudaResultRing
from megatron_async.device.protocol import ResultRing
from megatron_async.models.network import Network
from megatron_async.models.parallel import ModelParallel
from megatron_async.runner.drafter import Drafter, SampledRows
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.masks import MaskRing
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling.log_probs import pack, processed_log_probs, token_log_probs
from megatron_async.sampling.process_logits import advance, process_logits
from megatron_async.sampling.sample import SampleInputs
from megatron_async.step import packet
from megatron_async.step.extras import LOG_PROB_WORDS, PROCESSED_LOG_PROBS, RAW_LOG_PROBS
from megatron_async.step.plan import SampleShape
from megatron_async.step.records import (
    ENDED,
    FAILED,
    RECORD_STATUS,
    RECORD_TOKENS,
    RUNNING,
    record_width,
)

TOLD_SLOT, TOLD_FIRST, TOLD_FINAL, TOLD_LAST = range(4)
"""What stages are told of a row, int32 ``[TOLD_HEAD + record, rows]``: its slot, or the null slot
if it brings nothing; the position of its first token; the index and the id of the last that counts.
Its record follows."""
TOLD_HEAD = 4


class SamplingExtras(NamedTuple):
    """What the extended S reads besides the state of all slots."""

    tables: ExtrasTables
    masks: MaskRing


class SamplingStage:
    """S in torch, plain and extended, for rows that bring one token or a window of them.

    Args:
        row_records: int32 ``[max_rows, ROW_WIDTH]``, the row map of the pending logits.
        drafter: None without drafts.
        extras: None where there is no extended S.
        synthetic_acceptance: the rate at which drafts count as right, for ``bench``.
    """

    def __init__(
        self,
        row_records: torch.Tensor,
        batch: ForwardBatch,
        model: Network,
        drafter: Drafter | None,
        results: ResultRing,
        extras: SamplingExtras | None,
        synthetic_acceptance: float | None = None,
    ) -> None:
        self._row_records = row_records
        self._batch = batch
        self._state = batch.slots
        self._model = model
        self._drafter = drafter
        self._results = results
        self._extras = extras
        self._synthetic_acceptance = synthetic_acceptance
        self._parallel: ModelParallel | None = model.parallel
        widest = 1 + batch.num_speculative_tokens
        self._offsets = torch.arange(widest, device=row_records.device)
        self._sampled = 0
        """How often S has run: where it is not captured, the number of its ticket."""

    def restart(self) -> None:
        """The next S is that of ticket 0."""
        self._sampled = 0

    def sample(
        self,
        logits: torch.Tensor,
        shape: SampleShape,
        processed: torch.Tensor | None = None,
    ) -> None:
        """Sample ``logits`` ``[rows * window, vocabulary]``, those of row r's window from
        ``r * window`` on; with ``processed`` these in their place."""
        if self._parallel is not None and not self._parallel.is_last:
            self._take(self._parallel, shape)
            return
        state, (rows, window, drafts, extended) = self._state, shape
        offsets = self._offsets[:window]
        records = self._row_records[:rows]
        slots = records[:, packet.ROW_SLOT].long()
        samples = records[:, packet.ROW_SAMPLES]
        positions = state.kv_length[slots][:, None] + offsets
        each = slots.repeat_interleave(window)
        if extended and self._parallel is not None:
            logits = self._parallel.gather_logits(logits, self._model.vocab_size)
        sampled = logits if processed is None else processed
        if extended:
            sampled = self._process(sampled, window, each, positions.flatten())
        # From whole rows each rank samples the same.
        sample: Callable[..., torch.Tensor] = sample_tokens
        if self._parallel is not None and not extended:
            sample = partial(self._parallel.sample, sample_tokens)
        tokens = sample(
            sampled,
            SampleInputs(
                state.inverse_temperature[each],
                state.top_k[each],
                state.top_p[each],
                state.seed[each],
                positions.flatten(),
            ),
            vocab_size=self._model.vocab_size,
        ).view(rows, window)
        live = (samples != 0) & ~state.finished[slots]
        # A draft of the row is accepted while it is what was sampled in its place.
        right = tokens[:, :-1] == state.drafts[slots, : window - 1]
        if self._synthetic_acceptance is not None:
            from megatron_async.sampling.synthetic_acceptance import synthetic_bits, threshold

            bits = synthetic_bits(positions[:, 1:], state.seed[slots])
            right = bits < threshold(self._synthetic_acceptance)
        right &= offsets[1:] < samples[:, None]
        accepted = right.long().cumprod(1).sum(1)
        is_nan = tokens < 0
        is_stop = (tokens[:, :, None] == state.stop_ids[slots][:, None, :]).any(dim=2) & ~is_nan
        is_last = is_stop | is_nan | (positions + 1 >= state.max_total[slots][:, None])
        # The first position that ends the request, or ``window``.
        end = torch.where(is_last, offsets, window).amin(1)
        ended = end <= accepted
        final = torch.minimum(end, accepted)
        failed = ended & is_nan.gather(1, final[:, None])[:, 0]
        counts = torch.where(live, final + (~failed).long(), 0)
        last = tokens.gather(1, final[:, None])[:, 0].clamp(min=0)
        status = torch.where(failed, FAILED, torch.where(ended, ENDED, RUNNING))
        status = torch.where(live, status, ENDED)
        # Rows that are not live write to the null slot, which stays finished.
        target = torch.where(live, slots, self._batch.null_slot)
        state.last_token[target] = last
        state.finished[target] = ended | ~live
        record = torch.cat([torch.stack([counts, status]), tokens.T]).to(torch.int32)
        if extended:
            assert self._extras is not None
            log_probs = self._log_probs(self._extras.tables, logits, sampled, each, tokens)
            record = torch.cat([record, log_probs])
            advance(self._extras.tables, target, tokens, counts, positions[:, 0])
            if self._extras.tables.automata is not None:
                counted = torch.where(live, final, 0)
                self._follow_automata(self._extras.tables, target, tokens, counted)
        if self._parallel is not None and self._parallel.layout.pipeline > 1:
            counted = torch.where(live, final, 0)
            told = torch.stack([target, positions[:, 0], counted, last]).to(torch.int32)
            self._parallel.tell_stages(torch.cat([told, record]))
        self._hand_out(record)
        if self._drafter is not None:
            counted = torch.where(live, final, 0)
            state.kv_length[target] += counted
            rows_sampled = SampledRows(target, tokens.clamp(min=0), counted, positions[:, 0])
            self.draft(rows_sampled, drafts)

    def _take(self, parallel: ModelParallel, shape: SampleShape) -> None:
        """Take what the last stage has sampled. A slot that has ended here meanwhile, since control
        came, stays so."""
        state, (rows, window, drafts, extended) = self._state, shape
        width = TOLD_HEAD + record_width(window, extended=extended)
        told = torch.empty(width, rows, dtype=torch.int32, device=self._row_records.device)
        parallel.take_sampled_(told)
        slots, first, final, last = told[:TOLD_HEAD].long()
        record = told[TOLD_HEAD:]
        state.last_token[slots] = last
        state.finished[slots] |= record[RECORD_STATUS] != RUNNING
        self._hand_out(record)
        if self._drafter is not None:
            state.kv_length[slots] += final
            tokens = record[RECORD_TOKENS : RECORD_TOKENS + window].T.long().clamp(min=0)
            self.draft(SampledRows(slots, tokens, final, first), drafts)

    def _hand_out(self, record: torch.Tensor) -> None:
        self._results.publish(record.flatten())
        self._sampled += 1

    def draft(self, rows: SampledRows, count: int) -> None:
        """Have ``count`` drafts of the next windows of ``rows`` made, behind their records."""
        assert self._drafter is not None
        drafts = self._drafter.draft(rows, count)
        if drafts is not None:
            self._state.drafts[:, :count][rows.slots] = drafts

    def _process(
        self, logits: torch.Tensor, window: int, each: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Float32 logits as the slots' extras want them; the slots are ``each`` of the windows'
        positions ``[rows * window]``."""
        assert self._extras is not None
        state, rows = self._state, len(each) // window
        ring = self._extras.masks
        if isinstance(self._results, CudaResultRing):
            masks, masked = ring.copied(self._results.counter)
        else:
            masks, masked = ring.entry(self._sampled)
        masks, masked = masks[: len(each)], masked[: len(each)].bool()
        if self._extras.tables.automata is not None:
            masks, masked = self._guide(self._extras.tables, masks, masked, each, window)
        ahead = None
        if window > 1:
            # Position j of a window comes behind the drafts before it, if it counts at all.
            j = self._offsets[:window].repeat(rows)[:, None]
            drafted = state.drafts[each, : window - 1]
            ahead = torch.where(self._offsets[: window - 1] < j, drafted, -1)
        return process_logits(
            logits[:, : self._model.vocab_size],
            self._extras.tables,
            each,
            positions,
            state.inverse_temperature[each],
            masks,
            masked,
            ahead,
        )

    def _guide(
        self,
        tables: ExtrasTables,
        masks: torch.Tensor,
        masked: torch.Tensor,
        each: torch.Tensor,
        window: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``masks`` and ``masked`` of the windows' positions with those of automata in them."""
        slots = each[::window]
        rows = (tables.automaton[slots] >= 0).nonzero()[:, 0]
        if tables.automata is None or not len(rows):
            return masks, masked
        from megatron_async.sampling.automata import masks_at, place_states

        slots = slots[rows]
        states, stops = tables.automaton[slots].long(), tables.stops[slots]
        drafts = self._state.drafts[slots, : window - 1]
        places = place_states(tables.automata, states, drafts, stops)
        at = (rows[:, None] * window + self._offsets[:window]).flatten()
        of_place = stops.repeat_interleave(window, 0)
        # The ring's own entry stays as the host has written it.
        masks, masked = masks.clone(), masked.clone()
        masks[at] = masks_at(tables.automata, places.flatten(), of_place)
        masked[at] = True
        return masks, masked

    @staticmethod
    def _follow_automata(
        tables: ExtrasTables, target: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor
    ) -> None:
        from megatron_async.sampling.automata import advance_states

        assert tables.automata is not None
        advance_states(tables.automata, tables.automaton, target, tokens, last, tables.stops)

    def _log_probs(
        self,
        tables: ExtrasTables,
        logits: torch.Tensor,
        processed: torch.Tensor,
        each: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """int32 ``[window * LOG_PROB_WORDS, rows]`` of the sampled ``tokens`` [rows, window]."""
        state, flat = self._state, tokens.flatten()
        wants = tables.log_probs[each]
        words = torch.zeros(LOG_PROB_WORDS, len(flat), dtype=torch.int32, device=flat.device)
        rows = self._rows_that(wants == RAW_LOG_PROBS)
        if len(rows):
            found = token_log_probs(logits[rows, : self._model.vocab_size], flat[rows])
            words[:, rows] = torch.where((wants == RAW_LOG_PROBS)[rows], pack(*found), 0)
        rows = self._rows_that(wants == PROCESSED_LOG_PROBS)
        if len(rows):
            slots = each[rows]
            found = processed_log_probs(
                processed[rows],
                state.inverse_temperature[slots],
                state.top_k[slots],
                state.top_p[slots],
                flat[rows],
            )
            wanted = (wants == PROCESSED_LOG_PROBS)[rows]
            words[:, rows] = torch.where(wanted, pack(*found), words[:, rows])
        return words.view(-1, *tokens.shape).permute(2, 0, 1).flatten(0, 1)

    def _rows_that(self, chosen: torch.Tensor) -> torch.Tensor:
        """The rows of a bool ``[N]``; all of them where the device may not be read."""
        if chosen.is_cuda:
            return torch.arange(len(chosen), device=chosen.device)
        return chosen.nonzero()[:, 0]
