"""What attention must know of the tokens of one forward."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.runner.memory.slot_state import SlotState


class AttentionMetadata(NamedTuple):
    """Attention metadata of a forward over T tokens: the decode rows' first, one each, then those
    of prefill chunks.

    Args:
        position_ids, token_slots: int64 [T].
        slot_mapping: int64 [T], block * block size + offset in the KV cache; rows that have ended
            and padding go to the null block.
        decode_rows: tokens that attend as a row of their own.
        decode_lengths: int64 [decode_rows], tokens that each of them attends to.
        decode_lengths_host: the same on the host, where the device may be read.
        chunks: int32 [N, 4], the prefill chunks: slot, first token, number of tokens, first
            position; entries without tokens come last. None in a decode step.
        last_token_index: int64 [R], the token whose logits row r wants; None means token r.
        window: of a decode step whose rows bring this many tokens each, one row after the other, of
            consecutive positions but for padding behind the last ones; None says nothing.
        has_gaps: there may be padding in front of a row's first token too.
    """

    position_ids: torch.Tensor
    token_slots: torch.Tensor
    slot_mapping: torch.Tensor
    decode_rows: int
    decode_lengths: torch.Tensor
    decode_lengths_host: list[int] | None = None
    chunks: torch.Tensor | None = None
    last_token_index: torch.Tensor | None = None
    window: int | None = None
    has_gaps: bool = False


def no_tokens(device: torch.device) -> AttentionMetadata:
    """The metadata before the first forward."""
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    return AttentionMetadata(nothing, nothing, nothing, 0, nothing)


def metadata_of_tokens(
    state: SlotState,
    block_size: int,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    decode_rows: int,
    chunks: torch.Tensor | None = None,
    last_token_index: torch.Tensor | None = None,
    read_lengths: bool = False,
    window: int | None = None,
) -> AttentionMetadata:
    """Metadata of T tokens from their slots and positions, int64 [T]; padding has the null slot.

    Args:
        read_lengths: the device may be read by the caller, so lengths may steer shapes.
        window: see :class:`AttentionMetadata`.
    """
    token_slots = token_slots.contiguous()
    blocks = state.block_table[token_slots, positions // block_size]
    # A dead row writes to the null block, so its overshoot harms nothing at any depth.
    blocks = torch.where(state.finished[token_slots], NULL_BLOCK, blocks)
    lengths = positions[:decode_rows] + 1
    return AttentionMetadata(
        positions,
        token_slots,
        blocks * block_size + positions % block_size,
        decode_rows,
        lengths,
        lengths.tolist() if read_lengths else None,
        chunks,
        last_token_index,
        window,
    )


def metadata_of_mixed(
    state: SlotState,
    block_size: int,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    decodes: torch.Tensor,
    chunks: torch.Tensor,
    last_token_index: torch.Tensor,
    null_slot: int,
    read_lengths: bool,
) -> AttentionMetadata:
    """Metadata of decode rows, chunks and padding, with their counts on the device.

    Args:
        decodes: bool [T], true for the tokens of decode rows, which come first, and padding.
        last_token_index: int64 [R]; no more than R tokens are decode rows.
    """
    if read_lengths:
        # Among them may be drafts behind the end of their request, which are padding.
        held = (decodes & (token_slots != null_slot)).nonzero()
        rows = int(held[-1]) + 1 if len(held) else 0
    else:
        rows = min(last_token_index.shape[0], token_slots.shape[0])
    metadata = metadata_of_tokens(
        state,
        block_size,
        token_slots,
        positions,
        decode_rows=rows,
        chunks=chunks,
        last_token_index=last_token_index,
        read_lengths=read_lengths,
    )
    # Behind the decode rows may come tokens of chunks: as a row each attends to one position, and
    # the attention of its chunk overwrites what comes out.
    lengths = torch.where(decodes[:rows], metadata.decode_lengths, 1)
    return metadata._replace(decode_lengths=lengths)
