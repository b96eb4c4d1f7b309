"""What the device does in a step: C takes control, S samples, H2D takes the packet, F is the model.

Everything here runs on the device's stream, from inside a graph when the shape is captured.
Nothing here reads a device value on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.device.protocol import Device, PacketRing, ResultRing
from megatron_async.runner.attention_metadata import metadata_of_mixed
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.sampler import sample_tokens
from megatron_async.step import packet
from megatron_async.step.packet import PacketLayout, StepShape
from megatron_async.step.records import ENDED, FAILED, RUNNING
from megatron_async.step.slot_fields import Source

if TYPE_CHECKING:
    from megatron_async.kernels.sampling.step_state import StepKernels


class Model(Protocol):
    """What S and F need of a model. One that drafts has ``num_speculative_tokens`` and ``draft``
    besides: see :class:`DraftingModel`."""

    vocab_size: int

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: DynamicInferenceContext,
    ) -> torch.Tensor:
        """Token ids and positions [T] int64 -> logits [R, vocab] of the rows that
        ``context.last_token_index`` names."""


class DraftingModel(Model, Protocol):
    """A model that guesses the tokens after the one that was sampled last."""

    num_speculative_tokens: int

    def draft(self, context: DynamicInferenceContext, slots: torch.Tensor) -> torch.Tensor:
        """Drafts [R, num_speculative_tokens] int64 of what follows the last token of ``slots`` [R];
        runs on the device's stream behind S."""


class StepProgram:
    """C, S, H2D and F over static buffers.

    ``row_records`` is the row map of the last forward until the next H2D overwrites it (WAR: S of
    the pending logits comes before it in stream order). ``pending_logits`` belong to that row map:
    those of row r's window from ``r * window`` on.

    On CUDA what is around the model in a decode step without drafts runs in the kernels of
    ``kernels/sampling/step_state.py``; the torch code here is their reference.
    """

    def __init__(
        self,
        device: Device,
        context: DynamicInferenceContext,
        model: Model,
        layout: PacketLayout,
        packets: PacketRing,
        controls: PacketRing,
        results: ResultRing,
        *,
        logits_dtype: torch.dtype,
        poison: bool,
    ) -> None:
        self._device = device
        self._context = context
        self._state = context.slots
        self._model = model
        self._layout = layout
        self._window = layout.window
        self._packets = packets
        self._controls = controls
        self._results = results
        self._poison = poison
        on = device.torch_device
        self._control = torch.zeros(layout.control_size, dtype=torch.int32, device=on)
        self._packet = torch.zeros(layout.width, dtype=torch.int32, device=on)
        self._row_records = self._packet[: layout.admissions].view(-1, packet.ROW_WIDTH)
        self._row_records[:, packet.ROW_SLOT] = context.null_slot
        self._offsets = torch.arange(self._window, device=on)
        self._pending_logits = torch.zeros(
            layout.max_rows * self._window, model.vocab_size, dtype=logits_dtype, device=on
        )
        self._kernels: StepKernels | None = None
        if isinstance(packets, CudaPacketRing) and isinstance(results, CudaResultRing):
            from megatron_async.kernels.sampling.step_state import StepKernels

            if self._window == 1:
                self._kernels = StepKernels(
                    self._row_records, context.slots, context.block_size_tokens, packets, results
                )

    # --- C ------------------------------------------------------------------------------------

    def load_control(self) -> None:
        """Take the next control packet: slots that have ended, new values of REQUEST fields."""
        layout, null_slot = self._layout, self._context.null_slot
        self._controls.read(self._control, layout.control_size)
        records = self._control.view(layout.slot_count, layout.control_width)
        slots = records[:, packet.CONTROL_SLOT].long()
        ends = records[:, packet.CONTROL_ENDS] != 0
        has_values = records[:, packet.CONTROL_HAS_VALUES] != 0
        self._state.finished.index_fill_(0, torch.where(ends, slots, null_slot), True)
        words = records[:, packet.CONTROL_HEAD :]
        self._state.write(torch.where(has_values, slots, null_slot), words, Source.REQUEST)

    # --- S ------------------------------------------------------------------------------------

    def sample(self, rows: int) -> None:
        """Sample the pending logits of the last forward's ``rows`` rows and hand the records
        out."""
        logits = self._pending_logits[: rows * self._window]
        if self._kernels is not None:
            self._kernels.sample(logits)
        else:
            self._sample(logits, rows)
        if self._poison:
            logits.fill_(float("nan") if logits.is_floating_point() else -1)

    def _sample(self, logits: torch.Tensor, rows: int) -> None:
        state, window, offsets = self._state, self._window, self._offsets
        records = self._row_records[:rows]
        slots = records[:, packet.ROW_SLOT].long()
        samples = records[:, packet.ROW_SAMPLES]
        positions = state.kv_length[slots][:, None] + offsets
        each = slots.repeat_interleave(window)
        tokens = sample_tokens(
            logits,
            state.inverse_temperature[each],
            state.top_k[each],
            state.top_p[each],
            state.seed[each],
            positions.flatten(),
            vocab_size=self._model.vocab_size,
        ).view(rows, window)
        live = (samples != 0) & ~state.finished[slots]
        # A draft is accepted while it is what was sampled in its place.
        right = (tokens[:, :-1] == state.drafts[slots]) & (offsets[1:] < samples[:, None])
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
        target = torch.where(live, slots, self._context.null_slot)
        state.last_token[target] = last
        state.finished[target] = ended | ~live
        if window > 1:
            state.kv_length[target] += torch.where(live, final, 0)
            state.drafts[target] = self._model.draft(self._context, slots)  # type: ignore[attr-defined]
        record = torch.cat([torch.stack([counts, status]), tokens.T])
        self._results.publish(record.to(torch.int32).flatten())

    # --- H2D ----------------------------------------------------------------------------------

    def load_decode(self, rows: int) -> None:
        """Take the packet of a step that decodes in each of ``rows`` rows."""
        if self._kernels is not None:
            self._kernels.begin(rows)
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
        self._state.finished[slots] = slots == self._context.null_slot

    # --- F ------------------------------------------------------------------------------------

    def forward_decode(self, rows: int) -> None:
        """Each row's last token at its slot's length, and its drafts behind it."""
        context, state, window = self._context, self._state, self._window
        if self._kernels is not None:
            batch = self._kernels.batch(rows)
            context.begin_decode(batch.slots, batch.position_ids, batch.slot_mapping, batch.lengths)
            self._forward(rows, batch.token_ids, batch.position_ids)
            return
        slots = self._row_records[:rows, packet.ROW_SLOT].long()
        lengths = state.kv_length[slots]
        token_slots, positions, ids = slots, lengths, state.last_token[slots]
        if window > 1:
            token_slots = slots.repeat_interleave(window)
            positions = (lengths[:, None] + self._offsets).flatten()
            ids = torch.cat([ids[:, None], state.drafts[slots]], dim=1).flatten()
            token_slots, positions = self._within(token_slots, positions)
        context.begin_forward(
            token_slots,
            positions,
            decode_rows=rows * window,
            read_lengths=not self._device.captures,
        )
        self._forward(rows, ids, positions)
        state.kv_length[slots] = lengths + (~state.finished[slots]).long()

    def forward_mixed(self, shape: StepShape) -> None:
        """Decode rows first, then prefill chunks, then padding."""
        context, layout, state = self._context, self._layout, self._state
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
        if self._window > 1:
            # The drafts of a slot, with what is before them in column 0.
            columns = torch.nn.functional.pad(state.drafts, (1, 0))
            drafted = columns[token_slots, draft.clamp(min=0)]
            ids = torch.where(decodes & (draft > 0), drafted, ids)
            token_slots, positions = self._within(token_slots, positions)
            is_window = records[:, packet.ROW_SAMPLES] > 1
            further = torch.where(is_window[:, None], self._offsets, 0)
            last_token_index = (last_token_index[:, None] + further).flatten()
        context.begin(
            metadata_of_mixed(
                state,
                context.block_size_tokens,
                token_slots,
                positions,
                decodes=decodes,
                chunks=chunks[: shape.rows],
                last_token_index=last_token_index,
                null_slot=context.null_slot,
                read_lengths=not self._device.captures,
            )
        )
        self._forward(shape.rows, ids, positions)
        slots = records[:, packet.ROW_SLOT].long()
        lengths = records[:, packet.ROW_QUERY_LENGTH].long()
        state.kv_length[slots] += torch.where(state.finished[slots], 0, lengths)

    def _within(
        self, token_slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions [T], where drafts behind the last token but one of a request, which
        has no blocks for them, become padding."""
        beyond = positions + 1 >= self._state.max_total[token_slots]
        null_slot = self._context.null_slot
        return torch.where(beyond, null_slot, token_slots), torch.where(beyond, 0, positions)

    def _forward(self, rows: int, ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = self._pending_logits[: rows * self._window]
        into = getattr(self._model, "forward_into", None)
        if into is not None:
            into(logits, ids, positions, self._context)
        else:
            logits.copy_(self._model.forward(ids, positions, self._context))

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fill freed KV blocks with garbage."""
        cache = self._context.kv_cache
        cache[:, :, blocks] = float("nan") if cache.is_floating_point() else -1
