"""A forward of whole prompts, with a cache for these alone: outside of any engine's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.runner.memory.recurrent_states import StepStates
from megatron_async.step.packet import padded_tokens

BLOCK_SIZE_TOKENS = 64


def batch_of_prompts(
    network: Any,
    spec: KVCacheSpec,
    lengths: Sequence[int],
    *,
    batch_invariant: bool,
    recurrent_state_dtype: str | None = None,
) -> ForwardBatch:
    """A cache of ``spec`` for sequences of ``lengths`` tokens, and a slot for each."""
    longest = max(lengths)
    columns = -(-longest // BLOCK_SIZE_TOKENS)
    counts = [-(-length // BLOCK_SIZE_TOKENS) for length in lengths]
    sizes = CacheSizes.of(
        spec.token_bytes,
        max_sequence_length=max(longest, 2),
        max_requests=len(lengths),
        slot_count=len(lengths),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        block_count=sum(counts),
        batch_invariant=batch_invariant,
    )
    batch = ForwardBatch(KVCache(sizes, spec, network.device))
    table, first = torch.zeros(len(lengths), columns, dtype=torch.int64), 1
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count)
        first += count
    batch.block_table[: len(lengths), :columns] = table.to(batch.device)
    batch.finished[: len(lengths)] = False
    recurrent = network.recurrent_state_spec
    if recurrent is not None:
        batch.keep_states(recurrent.with_dtype(recurrent_state_dtype), 0)
    return batch


def forward_prompts(
    network: Any, batch: ForwardBatch, token_ids: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Logits ``[T, vocab]`` of sequences that lie one behind the other in int64 ``[T]``, whose
    ``batch`` is of :func:`batch_of_prompts`."""
    device = token_ids.device
    sizes = torch.tensor(lengths, device=device)
    slots = torch.arange(len(lengths), device=device)
    starts = sizes.cumsum(0) - sizes
    zeros = torch.zeros_like(starts)
    count = len(token_ids)
    further = padded_tokens(count) - count
    token_slots = slots.repeat_interleave(sizes)
    positions = torch.arange(count, device=device) - starts.repeat_interleave(sizes)
    pad = torch.nn.functional.pad
    token_slots = pad(token_slots, (0, further), value=batch.null_slot)
    positions, token_ids = pad(positions, (0, further)), pad(token_ids, (0, further))
    network.reserve_positions(max(lengths))
    batch.begin_forward(
        token_slots,
        positions,
        decode_rows=0,
        chunks=torch.stack((slots, starts, sizes, zeros), dim=1).int(),
        read_lengths=device.type == "cpu",
    )
    states = batch.states
    if states is not None:
        nobody = slots[:0]
        decode = states.decode_rows(nobody, nobody, batch.finished, 1)
        chunks = states.chunks(slots, zeros, starts, sizes, batch.finished)
        states.begin(StepStates(decode, chunks))
    logits: Tensor = network.forward(token_ids, positions, batch)[:count]
    return logits
