"""Rows of a forward as Mamba-2 layers take them, from what its context says of recurrent states.

One pass for all layers: each step has one :class:`~.layer.StateRows` of its decode rows, and one of
its prefill chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.mamba.layer import StateRows


class StepRows(NamedTuple):
    """The rows of a forward, the same for all layers. ``chunks`` is None in a decode step."""

    decode: StateRows
    chunks: StateRows | None


class WindowRows:
    """Makes the rows of decode steps. What depends on a step's shape alone is made once."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self,
        slots: Tensor,
        behind: Tensor,
        position_ids: Tensor,
        window: int,
        tokens: Tensor | None = None,
    ) -> StateRows:
        """R decode rows with windows of ``window`` tokens.

        Args:
            slots: int64 ``[R]``; the null slot for padding and dead rows.
            behind: int64 ``[R]``, drafts of the last window that were accepted; of rows of the null
                slot anything.
            position_ids: int64 ``[T]``.
            tokens: int64 ``[R, window]``, which of the T tokens they are, T behind the last one of
                a row; None: token j of row r is ``r * window + j``.
        """
        count = len(slots)
        slots, behind = slots.contiguous(), behind.contiguous()
        first, lengths, ones = self._of_shape(count, window, slots.device)
        if tokens is not None:
            first = tokens[:, 0].clamp(max=len(position_ids) - 1)
            lengths = (tokens < len(position_ids)).sum(1)
        is_plain = tokens is None and window == 1 and position_ids.is_contiguous()
        starts = position_ids[:count] if is_plain else position_ids[first]
        return StateRows(slots, first, lengths, starts, behind, ones)

    def _of_shape(
        self, count: int, window: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = count, window
        if key not in self._shapes:
            with torch.inference_mode(False):
                first = torch.arange(count, device=device) * window
                self._shapes[key] = (
                    first, torch.full_like(first, window), torch.ones_like(first),
                )  # fmt: skip
        return self._shapes[key]


def rows_of_chunks(
    slots: Tensor, offsets: Tensor, lengths: Tensor, position_ids: Tensor
) -> StateRows:
    """N prefill chunks of ``lengths`` tokens from token ``offsets`` on, int64 ``[N]``; those
    without tokens have the null slot."""
    slots, lengths = slots.contiguous(), lengths.contiguous()
    first = offsets.clamp(max=len(position_ids) - 1)
    return StateRows(slots, first, lengths, position_ids[first], torch.zeros_like(slots), lengths)
