"""Logits of whole sequences, by the engine's forward of prompts in batch-invariant mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.runner.memory.recurrent_states import StepStates
from megatron_async.step.packet import padded_tokens
from megatron_async.training.routing import expert_layers, noted_experts

BLOCK_SIZE_TOKENS = 64


class WholeSequences:
    """A model's logits, as an engine with ``batch_invariant=True`` has them.

    Args:
        network: in batch-invariant mode.
        max_tokens: most tokens of a forward, unless one sequence has more.
        recurrent_state_dtype: the engine's, see ``EngineConfig``.
    """

    def __init__(
        self, network: GPTNetwork, *, max_tokens: int, recurrent_state_dtype: str | None
    ) -> None:
        self._network = network
        self._expert_layers = expert_layers(network.model)
        self._max_tokens = max_tokens
        self._recurrent_state_dtype = recurrent_state_dtype

    @torch.no_grad()
    def logits(self, token_ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """``[T, vocab]`` of sequences that lie one behind the other in int64 ``[T]``, and the
        experts of each layer that has some, int32 ``[T, k]``."""
        parts, experts, first = [], [], 0
        for group in _groups(lengths, self._max_tokens):
            end = first + sum(group)
            with noted_experts(self._expert_layers) as noted:
                parts.append(self._forward(token_ids[first:end], group))
            experts.append([each[: end - first] for each in noted])
            first = end
        return torch.cat(parts), [torch.cat(of_layer) for of_layer in zip(*experts, strict=True)]

    def _forward(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        batch, device = self._batch(lengths), token_ids.device
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
        self._network.reserve_positions(max(lengths))
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
        return self._network.forward(token_ids, positions, batch)[:count]

    def _batch(self, lengths: list[int]) -> ForwardBatch:
        """A cache for these sequences, and a slot for each."""
        spec, longest = self._network.kv_cache_spec, max(lengths)
        columns = -(-longest // BLOCK_SIZE_TOKENS)
        counts = [-(-length // BLOCK_SIZE_TOKENS) for length in lengths]
        sizes = CacheSizes.of(
            spec.token_bytes,
            max_sequence_length=max(longest, 2),
            max_requests=len(lengths),
            slot_count=len(lengths),
            block_size_tokens=BLOCK_SIZE_TOKENS,
            block_count=sum(counts),
            batch_invariant=True,
        )
        batch = ForwardBatch(KVCache(sizes, spec, self._network.device))
        table, first = torch.zeros(len(lengths), columns, dtype=torch.int64), 1
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(first, first + count)
            first += count
        batch.block_table[: len(lengths), :columns] = table.to(batch.device)
        batch.finished[: len(lengths)] = False
        recurrent = self._network.recurrent_state_spec
        if recurrent is not None:
            batch.keep_states(recurrent.with_dtype(self._recurrent_state_dtype), 0)
        return batch


def _groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours of at most ``most`` tokens together, or one alone."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > most:
            yield group
            group = []
        group.append(length)
    if group:
        yield group
