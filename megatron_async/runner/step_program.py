"""What the device does in a step: C takes control, S samples, H2D takes the packet, F is the model.

Everything here runs on the device's stream, from inside a graph when the shape is captured.
Nothing here reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.device.protocol import Device, PacketRing, ResultRing
from megatron_async.kernels.attention.e4m3_cache import E4M3, NAN
from megatron_async.models.network import Network
from megatron_async.models.parallel import ModelParallel
from megatron_async.runner.drafter import Drafter, MixedTokens, SampledRows
from megatron_async.runner.memory.attention_metadata import (
    AttentionMetadata,
    metadata_of_mixed,
)
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.recurrent_states import RecurrentStates, StepStates
from megatron_async.runner.prompt_log_probs import PromptLogProbs, PromptTargets
from megatron_async.runner.sampling_stage import SamplingExtras, SamplingStage
from megatron_async.step import packet
from megatron_async.step.packet import PacketLayout, StepShape, padded_tokens
from megatron_async.step.plan import SampleShape
from megatron_async.step.slot_fields import Source

if TYPE_CHECKING:
    from megatron_async.kernels.sampling.step_kernels import StepKernels
    from megatron_async.runner.hidden_states import PromptHiddenStates
    from megatron_async.runner.routed_experts import RoutedExperts


WINDOW_KERNELS_ON = True
"""Engines made from now on run steps with drafts in kernels on CUDA; False takes the torch
code, with which tests compare them."""

RowProcessor = Callable[[torch.Tensor], torch.Tensor]
"""Logits of a row ``[vocabulary]`` to others."""


class StepProgram:
    """C, S, H2D and F over static buffers.

    The extended S processes logits by each slot's extras before it samples, and adds
    log-probabilities to the records.

    ``row_records`` is the row map of the last forward until the next H2D overwrites it (WAR: S of
    the pending logits comes before it in stream order). ``pending_logits`` belong to that row map,
    and to the window of that forward: those of row r from ``r * window`` on.

    On CUDA what is around the model in a decode step runs in ``kernels/sampling/step_kernels.py``;
    the torch code here is the reference. ``WINDOW_KERNELS_ON`` is about steps with drafts.
    """

    def __init__(
        self,
        device: Device,
        batch: ForwardBatch,
        model: Network,
        layout: PacketLayout,
        packets: PacketRing,
        controls: PacketRing,
        results: ResultRing,
        prompt_log_probs: PromptLogProbs,
        extras: SamplingExtras | None,
        *,
        logits_dtype: torch.dtype,
        poison: bool,
        drafter: Drafter | None = None,
        synthetic_acceptance: float | None = None,
        routes: RoutedExperts | None = None,
    ) -> None:
        self._device = device
        self._routes = routes
        self._batch = batch
        self._state = batch.slots
        self._model = model
        self._layout = layout
        self._packets = packets
        self._controls = controls
        self._prompt_log_probs = prompt_log_probs
        self.prompt_hidden_states: PromptHiddenStates | None = None
        """Where forwards leave the hidden states of prompts, from when some are asked for."""
        self._drafter = drafter
        self._poison = poison
        on = device.torch_device
        self._control = torch.zeros(layout.control_size, dtype=torch.int32, device=on)
        self._packet = torch.zeros(layout.width, dtype=torch.int32, device=on)
        self._row_records = self._packet[: layout.admissions].view(-1, packet.ROW_WIDTH)
        self._row_records[:, packet.ROW_SLOT] = batch.null_slot
        self._offsets = torch.arange(layout.window, device=on)
        self._pending_logits = torch.zeros(
            layout.max_rows * layout.window,
            model.logits_width or model.vocab_size,
            dtype=logits_dtype,
            device=on,
        )
        # Behind these there may be columns of padding.
        self._candidates = self._pending_logits[:, : model.vocab_size]
        self._parallel: ModelParallel | None = model.parallel
        self._has_stages = self._parallel is not None and self._parallel.layout.pipeline > 1
        self.takes_samples = self._parallel is not None and not self._parallel.is_last
        """S is T: it takes what the last of several stages has sampled."""
        self._stage = SamplingStage(
            self._row_records, batch, model, drafter, results, extras, synthetic_acceptance
        )
        self._kernels: StepKernels | None = None
        if isinstance(packets, CudaPacketRing) and isinstance(results, CudaResultRing):
            from megatron_async.kernels.sampling.step_kernels import StepKernels

            columns = None
            if self._parallel is not None:
                columns = self._parallel.columns(self._pending_logits.shape[1], model.vocab_size)
            takes_columns = columns is None or columns.suit_kernels
            if (layout.window == 1 or WINDOW_KERNELS_ON) and takes_columns:
                self._kernels = StepKernels(
                    self._row_records, batch.slots, batch.block_size_tokens, packets, results,
                    *(extras or (None, None)), window=layout.window, columns=columns,
                    synthetic_acceptance=synthetic_acceptance,
                )  # fmt: skip

    @property
    def extended_bytes(self) -> int:
        """Device memory of the extended S besides the extras tables."""
        return 0 if self._kernels is None else self._kernels.extended_bytes

    @property
    def guides_by_automata(self) -> bool:
        """S reads the pool of token automata: on a GPU by its kernels alone, since captured torch
        code would know no table that comes later."""
        if not self._device.captures:
            return True
        return self._kernels is not None and not self._has_stages

    @property
    def can_be_rehearsed(self) -> bool:
        """Whether its kernels may be launched without running: those of several ranks wait for each
        other."""
        return self._kernels is not None and self._parallel is None

    @property
    def rehearses_mixed(self) -> bool:
        """The same of steps with chunks: a drafter goes by what it reads in them."""
        return self.can_be_rehearsed and self._drafter is None

    @contextmanager
    def running(self, model: Network) -> Iterator[None]:
        """Forwards are meanwhile those of ``model``, in the same cache."""
        before, self._model = self._model, model
        try:
            yield
        finally:
            self._model = before

    def rehearse_sampling(self, rows: int, window: int, *, extended: bool) -> None:
        """Launch what is around the model in a decode step, without the drafter."""
        assert self._kernels is not None
        logits = self._candidates[: rows * window]
        if extended:
            self._kernels.sample_extended(logits, window=window)
        else:
            self._kernels.sample(logits, window=window)

    # --- C ------------------------------------------------------------------------------------

    def load_control(self) -> None:
        """Take the next control packet: slots that have ended, new values of REQUEST fields."""
        layout, null_slot = self._layout, self._batch.null_slot
        self._controls.read(self._control, layout.control_size)
        records = self._control.view(layout.slot_count, layout.control_width)
        slots = records[:, packet.CONTROL_SLOT].long()
        ends = records[:, packet.CONTROL_ENDS] != 0
        has_values = records[:, packet.CONTROL_HAS_VALUES] != 0
        self._state.finished.index_fill_(0, torch.where(ends, slots, null_slot), True)
        words = records[:, packet.CONTROL_HEAD :]
        self._state.write(torch.where(has_values, slots, null_slot), words, Source.REQUEST)

    # --- S ------------------------------------------------------------------------------------

    def sample(self, shape: SampleShape) -> None:
        """Sample the pending logits of the last forward, hand the records out, and draft."""
        logits = self._candidates[: shape.rows * shape.window]
        self._run_sample(logits, shape, None)
        if self._poison:
            logits.fill_(float("nan") if logits.is_floating_point() else -1)

    def finish_sends(self) -> None:
        """Wait, at the end of a graph, for what S has begun to tell other stages, since nothing
        that a graph begins may go on behind it."""
        if self._device.captures and self._parallel is not None:
            self._parallel.finish_sends()

    def restart(self) -> None:
        """The next S is that of ticket 0."""
        self._stage.restart()

    def process(self, shape: SampleShape, processors: Mapping[int, RowProcessor]) -> torch.Tensor:
        """The pending logits ``[rows * window, vocabulary]``, some rows as functions want them."""
        processed = self._candidates[: shape.rows * shape.window].clone()
        for row, process in processors.items():
            at = row * shape.window
            processed[at] = process(processed[at].clone())
        return processed

    def sample_processed(self, shape: SampleShape, processed: torch.Tensor) -> None:
        """The extended :meth:`sample` of what :meth:`process` returned. Log-probabilities of the
        model stay the model's."""
        self._run_sample(self._candidates[: shape.rows * shape.window], shape, processed)

    def _run_sample(
        self, logits: torch.Tensor, shape: SampleShape, processed: torch.Tensor | None
    ) -> None:
        if self._kernels is None or self._has_stages:
            self._stage.sample(logits, shape, processed)
            return
        if shape.extended:
            if self._parallel is not None:
                logits = self._parallel.gather_logits(logits, self._model.vocab_size)
            self._kernels.sample_extended(logits, processed, window=shape.window)
        else:
            self._kernels.sample(logits, window=shape.window)
        if self._drafter is not None:
            sampled = self._kernels.sampled(shape.rows, shape.window)
            self._stage.draft(SampledRows(*sampled), shape.drafts)

    # --- H2D ----------------------------------------------------------------------------------

    def load_decode(self, rows: int, window: int = 1) -> None:
        """Take the packet of a step that decodes in each of ``rows`` rows."""
        if self._kernels is not None:
            self._kernels.begin(rows, window)
            return
        self._packets.read(self._packet, rows * packet.ROW_WIDTH)
        records = self._row_records[:rows]
        self._assign(
            records[:, packet.ROW_ASSIGNED_SLOT],
            records[:, packet.ROW_ASSIGNED_COLUMN],
            records[:, packet.ROW_ASSIGNED_BLOCK],
        )

    def load_mixed(self, shape: StepShape) -> None:
        """Take the packet of a step with prefill chunks; its padding goes to the null slot."""
        layout = self._layout
        self._packets.read(self._packet, layout.tokens + shape.tokens * packet.TOKEN_WIDTH)
        words = self._packet[layout.admissions : layout.chunks]
        self._admit(words.view(-1, layout.admit_width)[: shape.rows])
        assigned = self._packet[layout.assignments : layout.tokens]
        assigned = assigned.view(-1, packet.ASSIGNMENT_WIDTH)
        self._assign(assigned[:, 0], assigned[:, 1], assigned[:, 2])

    def _assign(self, slots: torch.Tensor, columns: torch.Tensor, blocks: torch.Tensor) -> None:
        self._state.block_table.index_put_((slots.long(), columns.long()), blocks.long())

    def _admit(self, words: torch.Tensor) -> None:
        slots = words[:, packet.ADMIT_SLOT].long()
        values = words[:, packet.ADMIT_HEAD :]
        self._state.write(slots, values, Source.ADMISSION, Source.REQUEST)
        self._state.finished[slots] = slots == self._batch.null_slot
        if self._drafter is not None:
            self._state.computed_from[slots] = self._state.kv_length[slots]
            # A drafter may write behind the blocks that a request has.
            self._state.block_table.index_fill_(0, slots, NULL_BLOCK)

    # --- F ------------------------------------------------------------------------------------

    def forward_decode(self, rows: int, window: int = 1) -> None:
        """Each row's last token at its slot's length, and its drafts behind it; what a row has less
        than ``window`` is padding."""
        batch, state = self._batch, self._state
        if self._kernels is not None:
            tokens = self._kernels.batch(rows, window)
            batch.begin_decode(
                tokens.slots, tokens.position_ids, tokens.slot_mapping, tokens.lengths, window
            )
            if batch.states is not None:
                firsts = slice(None, None, window)
                self._begin_decode(
                    batch.states, tokens.slots[firsts], tokens.position_ids[firsts], window
                )
            hidden = self._hidden_states(rows * window)
            logits = self._pending_logits[: rows * window]
            self._forward(logits, tokens.token_ids, tokens.position_ids, hidden)
            return
        records = self._row_records[:rows]
        slots = records[:, packet.ROW_SLOT].long()
        lengths = state.kv_length[slots]
        token_slots, positions, ids = slots, lengths, state.last_token[slots]
        if window > 1:
            offsets = self._offsets[:window]
            is_drafted = offsets < records[:, packet.ROW_SAMPLES, None]
            token_slots = torch.where(is_drafted, slots[:, None], batch.null_slot).flatten()
            positions = (lengths[:, None] + offsets).flatten()
            ids = torch.cat([ids[:, None], state.drafts[slots, : window - 1]], dim=1).flatten()
            token_slots, positions = self._within(token_slots, positions)
        if not self._device.captures:
            further = padded_tokens(len(ids)) - len(ids)
            token_slots = pad(token_slots, (0, further), value=batch.null_slot)
            positions, ids = pad(positions, (0, further)), pad(ids, (0, further))
        batch.begin_forward(
            token_slots,
            positions,
            decode_rows=len(ids),
            read_lengths=not self._device.captures,
            window=window,
        )
        if batch.states is not None:
            self._begin_decode(batch.states, slots, lengths, window)
        hidden = self._hidden_states(len(ids))
        self._forward(self._pending_logits[: rows * window], ids, positions, hidden)
        state.kv_length[slots] = lengths + (~state.finished[slots]).long()

    def forward_mixed(self, shape: StepShape, targets: PromptTargets | None = None) -> None:
        """Decode rows first, then prefill chunks, then padding. ``targets``: log-probabilities of
        prompt tokens are wanted too."""
        batch, layout, state = self._batch, self._layout, self._state
        records = self._row_records[: shape.rows]
        chunks = self._packet[layout.chunks : layout.assignments].view(-1, packet.CHUNK_WIDTH)
        words = self._packet[layout.tokens :][: shape.tokens * packet.TOKEN_WIDTH]
        tokens = words.view(-1, packet.TOKEN_WIDTH).long()
        token_slots = tokens[:, packet.TOKEN_SLOT]
        ids, positions = tokens[:, packet.TOKEN_ID], tokens[:, packet.TOKEN_POSITION]
        decodes = positions < 0
        draft = -1 - positions  # 0: the last token
        ids = torch.where(decodes, state.last_token[token_slots], ids)
        positions = torch.where(decodes, state.kv_length[token_slots] + draft, positions)
        last_token_index = records[:, packet.ROW_LAST_TOKEN].long()
        if layout.window > 1:
            # The drafts of a slot, with what is before them in column 0.
            columns = pad(state.drafts, (1, 0))
            drafted = columns[token_slots, draft.clamp(min=0)]
            ids = torch.where(decodes & (draft > 0), drafted, ids)
            token_slots, positions = self._within(token_slots, positions)
            # What a row has less than the window repeats its last token.
            drafts = (records[:, packet.ROW_SAMPLES].long() - 1).clamp(min=0)
            further = torch.minimum(self._offsets[: shape.window], drafts[:, None])
            last_token_index = (last_token_index[:, None] + further).flatten()
        metadata = metadata_of_mixed(
            state,
            batch.block_size_tokens,
            token_slots,
            positions,
            decodes=decodes,
            chunks=chunks[: shape.rows],
            last_token_index=last_token_index,
            null_slot=batch.null_slot,
            read_lengths=not self._device.captures,
        )
        if batch.states is not None:
            self._begin_mixed(batch.states, shape, decodes, chunks[: shape.rows])
        logits = self._pending_logits[: shape.rows * shape.window]
        if targets is None:
            batch.begin(metadata)
            self._forward(logits, ids, positions)
        else:
            self._forward_with_targets(logits, ids, positions, metadata, targets)
        if self._drafter is not None:
            self._drafter.prefill(
                MixedTokens(
                    ids, positions, token_slots, decodes, chunks[: shape.rows], last_token_index
                ),
                self._model.hidden_states,
            )
        slots = records[:, packet.ROW_SLOT].long()
        lengths = records[:, packet.ROW_QUERY_LENGTH].long()
        state.kv_length[slots] += torch.where(state.finished[slots], 0, lengths)

    def _forward_with_targets(
        self,
        pending: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        targets: PromptTargets,
    ) -> None:
        """A forward that gives logits of the ``targets`` besides those of its rows. Like rows they
        are padded on the CPU, so that each has the same bits whatever the others are."""
        assert metadata.last_token_index is not None
        index = torch.tensor(targets.tokens, dtype=torch.int64, pin_memory=ids.is_cuda)
        index = index.to(ids.device, non_blocking=True)
        index = torch.cat([metadata.last_token_index, index])
        if not self._device.captures:
            index = pad(index, (0, padded_tokens(len(index)) - len(index)))
        self._batch.begin(metadata._replace(last_token_index=index))
        with self._routes_left(), self._hidden_states_left(targets):
            logits = self._model.forward(ids, positions, self._batch)
        count = len(pending)
        pending.copy_(logits[:count])
        prompt_logits = logits[count : count + len(targets.tokens)]
        vocab_size = self._model.vocab_size
        if self._parallel is not None:
            prompt_logits = self._parallel.gather_logits(prompt_logits, vocab_size, of_all=True)
        self._prompt_log_probs.publish(targets, prompt_logits[:, :vocab_size])

    def _begin_decode(
        self, states: RecurrentStates, slots: torch.Tensor, positions: torch.Tensor, window: int
    ) -> None:
        """Tell the recurrent layers of a decode step, by rows: ``positions`` are the first ones."""
        states.begin(StepStates(states.decode_rows(slots, positions, self._state.finished, window)))

    def _begin_mixed(
        self,
        states: RecurrentStates,
        shape: StepShape,
        decodes: torch.Tensor,
        chunks: torch.Tensor,
    ) -> None:
        """Tell the recurrent layers of a forward with chunks; ``decodes`` as in
        :func:`metadata_of_mixed`."""
        state, null_slot = self._state, self._batch.null_slot
        records = self._row_records[: shape.rows]
        firsts = records[:, packet.ROW_LAST_TOKEN].long()
        slots = torch.where(decodes[firsts], records[:, packet.ROW_SLOT].long(), null_slot)
        offsets = self._offsets[: shape.window]
        held = (offsets < records[:, packet.ROW_SAMPLES, None]) & (slots != null_slot)[:, None]
        tokens = torch.where(held, firsts[:, None] + offsets, shape.tokens)
        decode = states.decode_rows(
            slots, state.kv_length[slots], state.finished, shape.window, tokens
        )
        columns = chunks.long()
        found = states.chunks(
            columns[:, packet.CHUNK_SLOT],
            columns[:, packet.CHUNK_START],
            columns[:, packet.CHUNK_FIRST],
            columns[:, packet.CHUNK_LENGTH],
            state.finished,
        )
        states.begin(StepStates(decode, found))

    def _within(
        self, token_slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions [T], where drafts behind the last token but one of a request, which
        has no blocks for them, become padding like those of the null slot."""
        beyond = positions + 1 >= self._state.max_total[token_slots]
        null_slot = self._batch.null_slot
        return torch.where(beyond, null_slot, token_slots), torch.where(beyond, 0, positions)

    def _hidden_states(self, count: int) -> torch.Tensor | None:
        return None if self._drafter is None else self._drafter.hidden_states(count)

    def _forward(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        """Logits ``[rows * window, vocabulary]`` of these tokens."""
        with self._routes_left():
            self._model.forward_into(logits, ids, positions, self._batch, hidden_states)

    def _routes_left(self) -> AbstractContextManager[None]:
        """The forward meanwhile leaves the experts that it chooses, if somebody wants them."""
        return (
            nullcontext() if self._routes is None else self._routes.left(self._batch.slot_mapping)
        )

    def _hidden_states_left(self, targets: PromptTargets) -> AbstractContextManager[None]:
        """The forward meanwhile leaves hidden states of prompts, if this rank hands some out."""
        if self.prompt_hidden_states is None:
            return nullcontext()
        return self.prompt_hidden_states.left(self._model, targets)

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fill freed KV blocks with garbage."""
        cache = self._batch.kv_cache
        if cache.dtype == E4M3:
            cache.view(torch.uint8)[:, :, blocks] = NAN
            return
        cache[:, :, blocks] = float("nan") if cache.is_floating_point() else -1
