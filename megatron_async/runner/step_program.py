"""What the device does in a step: S samples, H2D takes the packet, F runs the model.

Everything here runs on the device's stream, from inside a graph when the shape is captured.
Nothing here reads a device value on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.device.protocol import Device, PacketRing, ResultRing
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.sampling.sample import sample_tokens
from megatron_async.step import packet
from megatron_async.step.packet import PacketLayout, StepShape

if TYPE_CHECKING:
    from megatron_async.kernels.sampling.step_state import StepKernels

RESULT_FIELDS = 3
"""Rows of a result record: token, live, ended."""


class Model(Protocol):
    """What S and F need of a model."""

    vocab_size: int

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: DynamicInferenceContext,
    ) -> torch.Tensor:
        """Token ids and positions [T] int64 -> logits [R, vocab] of the rows that
        ``context.last_token_index`` names."""


class StepProgram:
    """S, H2D and F over static buffers.

    ``row_records`` is the row map of the last forward until the next H2D overwrites it (WAR: S of
    the pending logits comes before it in stream order). ``pending_logits`` belong to that row map.

    On CUDA what is around the model in a decode step runs in the kernels of
    ``kernels/step_state.py``; the torch code here is their reference.
    """

    def __init__(
        self,
        device: Device,
        context: DynamicInferenceContext,
        model: Model,
        layout: PacketLayout,
        packets: PacketRing,
        results: ResultRing,
        *,
        logits_dtype: torch.dtype,
        poison: bool,
    ) -> None:
        self._device = device
        self._context = context
        self._model = model
        self._layout = layout
        self._packets = packets
        self._results = results
        self._poison = poison
        on = device.torch_device
        self._packet = torch.zeros(layout.width, dtype=torch.int32, device=on)
        self._row_records = self._packet[: layout.admissions].view(-1, packet.ROW_WIDTH)
        self._row_records[:, packet.ROW_SLOT] = context.null_slot
        self._pending_logits = torch.zeros(
            layout.max_rows, model.vocab_size, dtype=logits_dtype, device=on
        )
        self._kernels: StepKernels | None = None
        if isinstance(packets, CudaPacketRing) and isinstance(results, CudaResultRing):
            from megatron_async.kernels.sampling.step_state import StepKernels

            self._kernels = StepKernels(self._row_records, context, packets, results)

    # --- S ------------------------------------------------------------------------------------

    def sample(self, rows: int) -> None:
        """Sample the pending logits of the last forward's ``rows`` rows and hand the tokens out."""
        logits = self._pending_logits[:rows]
        if self._kernels is not None:
            self._kernels.sample(logits)
        else:
            self._sample(logits)
        if self._poison:
            logits.fill_(float("nan") if logits.is_floating_point() else -1)

    def _sample(self, logits: torch.Tensor) -> None:
        context = self._context
        records = self._row_records[: logits.shape[0]]
        slots = records[:, packet.ROW_SLOT].long()
        length = context.kv_length[slots]
        tokens = sample_tokens(
            logits,
            context.inverse_temperature[slots],
            context.top_k[slots],
            context.top_p[slots],
            context.seed[slots],
            length,
            vocab_size=self._model.vocab_size,
        )
        live = (records[:, packet.ROW_SAMPLES] != 0) & ~context.finished[slots]
        is_stop = (tokens[:, None] == context.stop_ids[slots]).any(dim=1)
        ended = is_stop | (length + 1 >= context.max_total[slots])
        # Rows that are not live write to the null slot, which stays finished.
        target = torch.where(live, slots, context.null_slot)
        context.last_token[target] = tokens
        context.finished[target] = ended | ~live
        self._results.publish(torch.stack([tokens, live, ended]).to(torch.int32).flatten())

    # --- H2D ----------------------------------------------------------------------------------

    def load_decode(self, rows: int) -> None:
        """Take the packet of a step that decodes one token in each of ``rows`` rows."""
        if self._kernels is not None:
            self._kernels.begin(rows)
            return
        self._packets.read(self._packet, rows * packet.ROW_WIDTH)
        records = self._row_records[:rows]
        self._grant(
            records[:, packet.ROW_GRANT_SLOT],
            records[:, packet.ROW_GRANT_COLUMN],
            records[:, packet.ROW_GRANT_BLOCK],
        )

    def load_mixed(self, shape: StepShape) -> None:
        """Take the packet of a step with prefill chunks; its padding goes to the null slot."""
        layout = self._layout
        self._packets.read(self._packet, layout.tokens + shape.tokens * packet.TOKEN_WIDTH)
        words = self._packet[layout.admissions : layout.chunks]
        self._admit(words.view(-1, packet.ADMIT_WIDTH)[: shape.rows])
        grants = self._packet[layout.grants : layout.tokens].view(-1, packet.GRANT_WIDTH)
        self._grant(grants[:, 0], grants[:, 1], grants[:, 2])

    def _grant(self, slots: torch.Tensor, columns: torch.Tensor, blocks: torch.Tensor) -> None:
        table = self._context.block_table
        table.index_put_((slots.long(), columns.long()), blocks.long())

    def _admit(self, words: torch.Tensor) -> None:
        context = self._context
        slots = words[:, packet.ADMIT_SLOT].long()
        floats = words.view(torch.float32)
        low = words[:, packet.ADMIT_SEED_LOW].long() & 0xFFFFFFFF
        high = words[:, packet.ADMIT_SEED_HIGH].long()
        context.inverse_temperature[slots] = floats[:, packet.ADMIT_INVERSE_TEMPERATURE]
        context.top_k[slots] = words[:, packet.ADMIT_TOP_K]
        context.top_p[slots] = floats[:, packet.ADMIT_TOP_P]
        context.seed[slots] = (high << 32) | low
        context.max_total[slots] = words[:, packet.ADMIT_MAX_TOTAL].long()
        context.stop_ids[slots] = words[:, packet.ADMIT_STOP_IDS :].long()
        context.kv_length[slots] = words[:, packet.ADMIT_CACHED].long()
        context.finished[slots] = slots == context.null_slot

    # --- F ------------------------------------------------------------------------------------

    def forward_decode(self, rows: int) -> None:
        """One token of each row: the slot's last token at the slot's length."""
        context = self._context
        if self._kernels is not None:
            batch = self._kernels.batch(rows)
            context.begin_decode(batch.slots, batch.position_ids, batch.slot_mapping, batch.lengths)
            self._forward(rows, batch.token_ids, batch.position_ids)
            return
        slots = self._row_records[:rows, packet.ROW_SLOT].long()
        positions = context.kv_length[slots]
        context.begin_forward(
            slots, positions, decode_rows=rows, read_lengths=not self._device.captures
        )
        self._forward(rows, context.last_token[slots], positions)
        context.kv_length[slots] = positions + (~context.finished[slots]).long()

    def forward_mixed(self, shape: StepShape) -> None:
        """Decode rows first, then prefill chunks, then padding."""
        context, layout = self._context, self._layout
        records = self._row_records[: shape.rows]
        chunks = self._packet[layout.chunks : layout.grants].view(-1, packet.CHUNK_WIDTH)
        words = self._packet[layout.tokens :][: shape.tokens * packet.TOKEN_WIDTH]
        tokens = words.view(-1, packet.TOKEN_WIDTH).long()
        token_slots = tokens[:, packet.TOKEN_SLOT]
        ids, positions = tokens[:, packet.TOKEN_ID], tokens[:, packet.TOKEN_POSITION]
        decodes = positions < 0
        ids = torch.where(decodes, context.last_token[token_slots], ids)
        positions = torch.where(decodes, context.kv_length[token_slots], positions)
        context.begin_mixed(
            token_slots,
            positions,
            decodes=decodes,
            chunks=chunks[: shape.rows],
            last_token_index=records[:, packet.ROW_LAST_TOKEN].long(),
            read_lengths=not self._device.captures,
        )
        self._forward(shape.rows, ids, positions)
        slots = records[:, packet.ROW_SLOT].long()
        lengths = records[:, packet.ROW_QUERY_LENGTH].long()
        context.kv_length[slots] += torch.where(context.finished[slots], 0, lengths)

    def _forward(self, rows: int, ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = self._pending_logits[:rows]
        into = getattr(self._model, "forward_into", None)
        if into is not None:
            into(logits, ids, positions, self._context)
        else:
            logits.copy_(self._model.forward(ids, positions, self._context))

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fill freed KV blocks with garbage."""
        cache = self._context.kv_cache
        cache[:, :, blocks] = float("nan") if cache.is_floating_point() else -1
