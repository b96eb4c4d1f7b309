"""The device-resident state of all slots, allocated and filled from the table of slot fields."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_async.device.memory import must_fit
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS
from megatron_async.step import slot_fields
from megatron_async.step.slot_fields import SlotField, Source, fields_from


class SlotState:
    """One tensor for each slot field, ``[slots + 1, ...]``; the last slot is the null slot.

    The attributes below are those of ``SLOT_FIELDS``; a field that the table gains is one more.
    """

    last_token: torch.Tensor
    finished: torch.Tensor
    block_table: torch.Tensor
    drafts: torch.Tensor
    computed_from: torch.Tensor
    kv_length: torch.Tensor
    max_total: torch.Tensor
    long_rotation: torch.Tensor
    stop_ids: torch.Tensor
    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor

    def __init__(self, slots: int, sizes: Mapping[str, int], device: torch.device) -> None:
        self._fields = slot_fields.SLOT_FIELDS
        for field in self._fields:
            columns = sizes[field.columns] if isinstance(field.columns, str) else field.columns
            shape = (slots + 1,) if columns is None else (slots + 1, columns)
            tensor = torch.empty(shape, dtype=getattr(torch, field.dtype), device=device)
            setattr(self, field.name, tensor)
        self.reset()

    def tensor(self, field: SlotField) -> torch.Tensor:
        """The tensor of a field."""
        tensor: torch.Tensor = getattr(self, field.name)
        return tensor

    def reset(self) -> None:
        """All slots hold no request."""
        for field in self._fields:
            self.tensor(field).fill_(field.default)

    def write(self, slots: torch.Tensor, words: torch.Tensor, *sources: Source) -> None:
        """Take the fields of ``sources`` from packet words, in stream order.

        Args:
            slots: int64 ``[N]``; several may be the null slot, whose values nobody reads.
            words: int32 ``[N, words of the fields]``.
        """
        at = 0
        for field in fields_from(*sources):
            value = _decoded(field, words[:, at : at + field.words])
            self.tensor(field)[slots] = value
            at += field.words


def allocate_slots(
    slot_count: int,
    max_sequence_length: int,
    max_blocks_per_request: int,
    num_drafts: int,
    device: torch.device,
) -> SlotState:
    """Allocate the state of slots for the given tokens, blocks and drafts each.

    Raises:
        CacheTooLargeError: it does not fit into the device's memory.
    """
    slots = slot_count + 1
    with must_fit(
        device,
        8 * slots * (max_blocks_per_request + MAX_STOP_TOKEN_IDS + num_drafts + 8),
        f"the state of {slots} slots for {max_sequence_length} tokens each",
        "max_requests, depth or max_sequence_length, or raise block_size_tokens",
    ):
        sizes = {"max_blocks_per_request": max_blocks_per_request, "num_drafts": num_drafts}
        return SlotState(slot_count, sizes, device)


def _decoded(field: SlotField, words: torch.Tensor) -> torch.Tensor:
    """Values ``[N]`` or ``[N, columns]`` of a field from its words."""
    if field.dtype == "int64":
        halves = words.long()
        values = (halves[:, 1::2] << 32) | (halves[:, 0::2] & 0xFFFFFFFF)
    elif field.dtype == "float32":
        values = words.contiguous().view(torch.float32)
    else:
        values = words.to(getattr(torch, field.dtype))
    return values[:, 0] if field.columns is None else values
