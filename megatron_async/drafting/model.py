"""Drafts of a smaller model over the same vocabulary.

Its keys and values stand in a cache of its own under the same block tables, so that admission,
prefix hits and evictions hold for both. It may take fewer positions than the model that verifies:
behind them its drafts are worth nothing, and the scheduler asks for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.engine_config import MAX_COUNT
from megatron_async.runner.drafter import MixedTokens, SampledRows
from megatron_async.runner.memory.attention_metadata import metadata_of_mixed
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling.sample import SampleInputs


class ModelDrafter:
    """Drafts the tokens of a row one after the other.

    Args:
        network: of the model that drafts.
        batch: of the model that verifies.
    """

    wants_tokens = False

    def __init__(self, network: Any, batch: ForwardBatch) -> None:
        self._network = network
        self._batch = batch.beside(network.kv_cache_spec.decoder)
        if self._batch.scales is not None:
            from megatron_async.runner.memory.cache_scales import choose_scales

            choose_scales(network, self._batch)
        self._state = batch.slots
        limits = (network.max_sequence_length, network.rotation_limit)
        self._limit = min((n for n in limits if n is not None), default=MAX_COUNT)
        slots = batch.slot_count + 1
        self._last = torch.zeros(slots, dtype=torch.int64, device=batch.device)
        """By slot, the last token that it has seen: its block may not have been there yet."""

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def hidden_states(self, count: int) -> None:
        return None

    def prefill(self, tokens: MixedTokens, hidden_states: Tensor | None) -> None:
        batch, null_slot = self._batch, self._batch.null_slot
        slots, firsts, lengths, _ = tokens.chunks.long().unbind(1)
        filled = lengths > 0
        lasts = torch.where(filled, firsts + lengths - 1, 0)
        self._last[torch.where(filled, slots, null_slot)] = tokens.ids[lasts]
        unread = tokens.decodes | (tokens.positions >= self._limit)
        positions = torch.where(unread, 0, tokens.positions)
        batch.begin(
            metadata_of_mixed(
                self._state,
                batch.block_size_tokens,
                torch.where(unread, null_slot, tokens.slots),
                positions,
                decodes=tokens.decodes,
                chunks=tokens.chunks,
                last_token_index=tokens.last_token_index,
                null_slot=null_slot,
                read_lengths=batch.device.type != "cuda",
            )
        )
        self._network.forward(tokens.ids, positions, batch)

    def draft(self, rows: SampledRows, count: int) -> Tensor:
        slots, sampled, last, first = rows
        number = torch.arange(len(slots), device=slots.device)
        # Token i stands at position ``first - 1 + i``.
        tokens = torch.cat([self._last[slots][:, None], sampled], dim=1)
        self._last[slots] = tokens[number, last + 1]
        start = first - 1
        index = torch.arange(tokens.shape[1], device=slots.device).expand(len(slots), -1)
        drafts: list[Tensor] = []
        # Without drafts too it must see the tokens that stay.
        for draft in range(max(count, 1)):
            end = last + 1 + draft
            if draft:
                index, tokens = end[:, None], drafts[-1][:, None]
            drafts.append(self._next(slots, tokens, start[:, None] + index, start + end))
        return torch.stack(drafts, dim=1)[:, :count]

    def _next(self, slots: Tensor, tokens: Tensor, positions: Tensor, end: Tensor) -> Tensor:
        """A draft [R] of what follows position ``end`` [R] of each slot, from ``tokens`` at
        ``positions`` [R, n], of which those up to ``end`` count."""
        state, batch = self._state, self._batch
        rows, width = positions.shape
        valid = (
            (positions <= end[:, None])
            & (slots != batch.null_slot)[:, None]
            & (positions + 1 < state.max_total[slots][:, None])
            & (positions < self._limit)
        ).flatten()
        # Positions behind a request's end or this model's may have no embedding.
        positions_read = torch.where(valid, positions.flatten(), 0)
        at = torch.arange(rows, device=slots.device) * width
        if width > 1:
            at = at + end - positions[:, 0]
        batch.begin_forward(
            torch.where(valid, slots.repeat_interleave(width), batch.null_slot),
            positions_read,
            decode_rows=rows * width,
            last_token_index=at,
            read_lengths=batch.device.type != "cuda",
        )
        logits = self._network.forward(tokens.flatten(), positions_read, batch)
        sample: Callable[..., Tensor] = sample_tokens
        parallel = self._network.parallel
        if parallel is not None:
            sample = partial(parallel.sample, sample_tokens)
        found = sample(
            logits,
            SampleInputs(
                state.inverse_temperature[slots],
                state.top_k[slots],
                state.top_p[slots],
                state.seed[slots],
                end + 1,
            ),
            vocab_size=self._network.vocab_size,
        )
        return found.clamp(min=0)
