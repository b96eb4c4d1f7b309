"""Drafts of a model's own multi-token prediction (MTP) layers.

In row t of layer l the hidden state that layer l - 1 (the decoder for layer 0) has of row t - 1
meets token t. Its keys and values stand at position t - l - 1, and its logits are about token
t + 1. So behind the last sampled token q layer 0 drafts in row q, layer 1 in row q + 1, from the
first draft, and so on. Drafts beyond the last layer come from that layer again, with what it has
put out itself for a hidden state.

Rows up to q have tokens that stay: each is computed once, by the chunk or the window that brought
its token. Rows behind q have drafts for tokens: the next window computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async.runner.attention_metadata import metadata_of_mixed
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.drafter import MixedTokens, SampledRows
from megatron_async.runner.sampler import sample_tokens

CHUNK_FIRST, CHUNK_LENGTH, CHUNK_START = 1, 2, 3


class MtpDrafter:
    """Drafts up to ``context.num_speculative_tokens`` tokens a row.

    Args:
        wrapper: a ``GPTInferenceWrapper`` over a model that has MTP layers.
        context: its cache has the MTP layers' layers behind the decoder's.
        max_rows: most rows of a step.
    """

    wants_tokens = False

    def __init__(self, wrapper: Any, context: DynamicInferenceContext, max_rows: int) -> None:
        self._wrapper = wrapper
        self._context = context
        self._state = context.slots
        self._count = context.num_speculative_tokens
        model = wrapper.model
        self._layers = len(model.mtp.layers)
        like: Tensor = next(model.parameters())
        hidden_size: int = model.config.hidden_size
        self._pending = like.new_zeros(max_rows * (self._count + 1), hidden_size)
        """Of the tokens of the pending logits."""
        self._tails = like.new_zeros(context.slot_count + 1, self._layers, hidden_size)
        """By slot and layer, what row t of it needs of row t - 1 when that came in an earlier
        forward: what the layer before has put out there."""

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
        target = torch.where(filled, slots, self._context.null_slot)
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
            self._context.begin(
                metadata_of_mixed(
                    state,
                    self._context.block_size_tokens,
                    torch.where(valid, tokens.slots, self._context.null_slot),
                    torch.where(valid, positions, 0),
                    decodes=~valid,
                    chunks=shifted,
                    last_token_index=pending,
                    null_slot=self._context.null_slot,
                    read_lengths=self._context.device.type != "cuda",
                )
            )
            hidden = self._run(layer, before, tokens.ids, tokens.positions)

    def draft(self, rows: SampledRows, count: int) -> Tensor:
        state, layers = self._state, self._layers
        slots, _, last, first = rows
        number = torch.arange(len(slots), device=slots.device)
        # Layers that draft nothing now must see the tokens that stay, to draft later.
        passes = max(count, min(layers, self._count))
        # Token i is about position ``first + i``; behind the last one come the drafts.
        tokens = torch.nn.functional.pad(rows.tokens, (0, passes))
        hidden = self._pending[: rows.tokens.numel()].view(*rows.tokens.shape, -1)
        chosen, tails = hidden[:, 0], self._tails[slots]
        for draft in range(passes):
            at = last + draft if draft < count else last
            if draft >= layers:
                index = at[:, None]
                hidden = self._run_window(
                    layers - 1, chosen[:, None], tokens, index, first, at, slots
                )
                chosen = hidden[:, 0]
            else:
                if draft > 0:
                    hidden = torch.cat([tails[:, draft, None], hidden], dim=1)
                index = torch.arange(hidden.shape[1], device=slots.device).expand(len(slots), -1)
                hidden = self._run_window(draft, hidden, tokens, index, first, at, slots)
                chosen = hidden[number, at]
                if draft + 1 < layers:
                    self._tails[slots, draft + 1] = hidden[number, last]
            if draft >= count:
                continue
            tokens[number, at + 1] = sample_tokens(
                self._wrapper.logits(chosen),
                state.inverse_temperature[slots],
                state.top_k[slots],
                state.top_p[slots],
                state.seed[slots],
                first + at + 1,
                vocab_size=self._wrapper.vocab_size,
            ).clamp(min=0)
        behind = last[:, None] + 1 + torch.arange(count, device=slots.device)
        return tokens.gather(1, behind)

    def _run_window(
        self,
        layer: int,
        hidden: Tensor,
        tokens: Tensor,
        index: Tensor,
        first: Tensor,
        at: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Rows ``first + index`` [R, n] of a layer, up to ``at``; from ``hidden`` [R, n, hidden] to
        the same."""
        context, state = self._context, self._state
        token_positions = first[:, None] + index
        positions = token_positions - layer - 1
        valid = (
            (index <= at[:, None])
            & (slots != context.null_slot)[:, None]
            & (positions >= state.computed_from[slots][:, None])
            & (positions + 1 < state.max_total[slots][:, None])
        ).flatten()
        each = slots.repeat_interleave(index.shape[1])
        context.begin_forward(
            torch.where(valid, each, context.null_slot),
            torch.where(valid, positions.flatten(), 0),
            decode_rows=index.numel(),
            read_lengths=context.device.type != "cuda",
        )
        ids = tokens.gather(1, index).flatten()
        out = self._run(layer, hidden.flatten(0, 1), ids, token_positions.flatten())
        return out.view(hidden.shape)

    def _run(self, layer: int, hidden: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Layer ``layer`` over tokens ``[T]`` whose attention the context knows."""
        out: Tensor = self._wrapper.mtp_forward(layer, hidden, ids, positions, self._context)
        return out
