"""Drafts of a model's own multi-token prediction (MTP) layers.

In row t of layer l the hidden state that layer l - 1 (the decoder for layer 0) has of row t - 1
meets token t. Its keys and values stand at position t - l - 1, and its logits are about token
t + 1. So behind the last sampled token q layer 0 drafts in row q, layer 1 in row q + 1, from the
first draft, and so on. Drafts beyond the last layer come from that layer again, with what it has
put out itself for a hidden state.

Rows up to q have tokens that stay: each is computed once, by the chunk or the window that brought
its token. Rows behind q have drafts for tokens: the next window computes them again where they were
not accepted (``mtp_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.drafting.mtp_rows import DraftRows, DraftShape, draft_rows
from megatron_async.kernels.drafting.mtp_input import DraftInput, NormParameters, hidden_before
from megatron_async.models.description.kv_cache_spec import plain_parameter
from megatron_async.models.parallel import ModelParallel
from megatron_async.runner.drafter import MixedTokens, SampledRows
from megatron_async.runner.memory.attention_metadata import metadata_of_mixed
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampler import has_triton, sample_tokens
from megatron_async.sampling.sample import SampleInputs, candidates

if TYPE_CHECKING:
    from megatron_async.kernels.drafting.mtp_rows import RowsKernel

CHUNK_FIRST, CHUNK_LENGTH, CHUNK_START = 1, 2, 3


class MtpDrafter:
    """Drafts up to ``batch.num_speculative_tokens`` tokens a row.

    Args:
        network: a ``GPTNetwork`` over a model that has MTP layers.
        batch: its cache has the MTP layers' layers behind the decoder's.
        max_rows: most rows of a step.
    """

    wants_tokens = False

    def __init__(self, network: Any, batch: ForwardBatch, max_rows: int) -> None:
        self._network = network
        self._batch = batch
        self._state = batch.slots
        self._count = batch.num_speculative_tokens
        model = network.model
        # Layers that give no draft are left alone.
        self._layers = min(len(model.mtp.layers), self._count)
        self._learns_positions: bool = model.position_embedding_type == "learned_absolute"
        like: Tensor = plain_parameter(model)
        hidden_size: int = model.config.hidden_size
        self._pending = like.new_zeros(max_rows * (self._count + 1), hidden_size)
        """Hidden states of the tokens of the pending logits."""
        self._tails = like.new_zeros(batch.slot_count + 1, self._layers, hidden_size)
        """By slot and layer, what row t of it needs of row t - 1 when that came in an earlier
        forward: what the layer before has put out there."""
        self._arrivals = torch.zeros(max_rows, dtype=torch.int32, device=batch.device)
        """What the sampler counts by row, zeros between its launches."""
        self._fused = network.fused_mtp()
        self._parallel: ModelParallel | None = network.parallel
        on_gpu = batch.device.type == "cuda" and has_triton()
        self._has_kernels = on_gpu and self._parallel is None

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def hidden_states(self, count: int) -> Tensor:
        return self._pending[:count]

    def prefill(self, tokens: MixedTokens, hidden_states: Tensor | None) -> None:
        assert hidden_states is not None
        state, hidden = self._state, hidden_states
        pending = tokens.last_token_index
        self._pending[: len(pending)] = hidden[pending]
        chunks = tokens.chunks.long()
        slots, firsts, lengths, starts = chunks.unbind(1)
        filled = lengths > 0
        lasts = torch.where(filled, firsts + lengths - 1, 0)
        target = torch.where(filled, slots, self._batch.null_slot)
        for layer in range(self._layers):
            # One row back; the first of a chunk has it from the chunk before.
            before = torch.cat([hidden[:1], hidden[:-1]])
            at = torch.where(filled, firsts, len(hidden))
            padded = torch.cat([before, before[:1]])
            before = padded.index_put_((at,), self._tails[target, layer])[:-1]
            self._tails[target, layer] = hidden[lasts]
            # Rows whose hidden state belongs to a prefix that was found in the cache, or to
            # nothing: their keys and values are there, or are not needed.
            positions = tokens.positions - layer - 1
            valid = ~tokens.decodes & (positions >= state.computed_from[tokens.slots])
            skipped = (state.computed_from[slots] + layer + 1 - starts).clamp(min=0)
            skipped = torch.minimum(skipped, lengths)
            shifted = tokens.chunks.clone()
            shifted[:, CHUNK_FIRST] += skipped
            shifted[:, CHUNK_LENGTH] -= skipped
            shifted[:, CHUNK_START] += skipped - layer - 1
            self._batch.begin(
                metadata_of_mixed(
                    state,
                    self._batch.block_size_tokens,
                    torch.where(valid, tokens.slots, self._batch.null_slot),
                    torch.where(valid, positions, 0),
                    decodes=~valid,
                    chunks=shifted,
                    last_token_index=pending,
                    null_slot=self._batch.null_slot,
                    read_lengths=self._batch.device.type != "cuda",
                )
            )
            hidden = self._run(layer, before, tokens.ids, tokens.positions)

    def draft(self, rows: SampledRows, count: int) -> Tensor | None:
        rows, hidden = self._whole_windows(rows)
        # Layers that draft nothing now must see the tokens that stay, to draft later.
        passes = max(count, self._layers)
        shape = DraftShape(len(rows.slots), 1 + self._count, self._layers, passes)
        drafts, begin = self._rows_of(rows, shape)
        norm = None
        for draft in range(passes):
            of = self._input_of(draft, hidden, rows, drafts, shape)
            hidden, logits, norm = self._run_draft(of._replace(norm=norm, begin=begin))
            begin = None
            if draft < count:
                into = drafts.tokens[:, shape.window + draft]
                self._sample(logits, rows.slots, drafts, draft, into)
        if self._has_kernels:
            return None
        return drafts.tokens[:, shape.window : shape.window + count]

    def _whole_windows(self, rows: SampledRows) -> tuple[SampledRows, Tensor]:
        """Rows and the hidden states of their tokens ``[R, w, hidden]``, where a step brought less
        than the largest window behind padding that no row reaches."""
        count, window = rows.tokens.shape
        hidden = self._pending[: rows.tokens.numel()].view(count, window, -1)
        missing = 1 + self._count - window
        if missing == 0:
            return rows, hidden
        tokens = torch.nn.functional.pad(rows.tokens, (0, missing))
        return rows._replace(tokens=tokens), torch.nn.functional.pad(hidden, (0, 0, 0, missing))

    def _rows_of(self, rows: SampledRows, shape: DraftShape) -> tuple[DraftRows, RowsKernel | None]:
        """What drafts run over, and what has yet to fill it: the first one's input does."""
        batch, state = self._batch, self._state
        block_size, null_slot = batch.block_size_tokens, batch.null_slot
        if self._has_kernels:
            from megatron_async.kernels.drafting.mtp_rows import rows_kernel

            kernel = rows_kernel(*rows, state, *shape[2:], block_size, null_slot)
            found = DraftRows._make([*kernel.outputs, None])
            if self._input_begins(shape):
                return found, kernel
            kernel()
            return found, None
        found = draft_rows(
            rows,
            state,
            shape,
            block_size=block_size,
            null_slot=null_slot,
            read_lengths=batch.device.type != "cuda",
        )
        return found, None

    def _input_begins(self, shape: DraftShape) -> bool:
        return (
            self._fused is not None
            and not self._learns_positions
            and self._fused.begins(shape.rows, shape.window, self._batch)
        )

    def _sample(
        self, logits: Tensor, slots: Tensor, drafts: DraftRows, draft: int, into: Tensor
    ) -> None:
        """Sample a draft of each row from logits ``[R, vocab]``; kernels keep it by slot too."""
        inputs = SampleInputs(
            drafts.inverse_temperature,
            drafts.top_k,
            drafts.top_p,
            drafts.seed,
            drafts.sample_positions[draft],
        )
        vocab_size: int = self._network.vocab_size
        if self._has_kernels:
            from megatron_async.kernels.drafting.mtp_rows import sample_draft
            from megatron_async.kernels.sampling.sample_cuda import Taken

            by_slot = self._state.drafts[:, draft]
            taken = Taken(into, by_slot, slots.contiguous(), self._arrivals)
            sample_draft(candidates(logits, vocab_size), inputs, taken)
            return
        sample: Callable[..., Tensor] = sample_tokens
        if self._parallel is not None:
            sample = partial(self._parallel.sample, sample_tokens)
        found = sample(logits, inputs, vocab_size=vocab_size)
        into.copy_(found.clamp(min=0))

    def _input_of(
        self, draft: int, hidden: Tensor, rows: SampledRows, drafts: DraftRows, shape: DraftShape
    ) -> DraftInput:
        """Begin the forward of the layer that gives a draft."""
        layer, metadata = shape.layer(draft), drafts.metadata(shape, draft)
        self._batch.begin(metadata)
        positions = metadata.position_ids
        if self._learns_positions:
            # Positions of tokens behind a request's end may have no embedding.
            positions = (positions + layer + 1).clamp(max=self._batch.max_sequence_length - 1)
        tokens = drafts.tokens[:, shape.columns(draft)]
        return DraftInput(
            draft, layer, tokens, positions, hidden, rows.last, rows.slots, self._tails
        )

    def _run_draft(self, of: DraftInput) -> tuple[Tensor, Tensor, NormParameters | None]:
        """Hidden states ``[R, n, hidden]`` that the layer puts out, logits ``[R, vocab]`` of the
        last token of each row, and the final norm if the hidden states have not passed it."""
        if self._fused is not None and self._fused.takes(of.layer, *of.tokens.shape, self._batch):
            found: tuple[Tensor, Tensor, NormParameters | None] = self._fused.forward(
                of, self._batch
            )
            return found
        before = hidden_before(of)
        hidden = self._run(of.layer, before.flatten(0, 1), of.tokens.flatten(), of.position_ids)
        hidden = hidden.view(before.shape)
        return hidden, self._network.logits(hidden[:, -1]), None

    def _run(self, layer: int, hidden: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Layer ``layer`` over tokens ``[T]`` whose attention the batch knows."""
        out: Tensor = self._network.mtp_forward(layer, hidden, ids, positions, self._batch)
        return out
