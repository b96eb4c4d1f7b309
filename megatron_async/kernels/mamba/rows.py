"""Rows of a forward as Mamba-2 layers take them, from what its context says of recurrent states.

One pass for all layers: each step has one :class:`~.layer.StateRows` of its decode rows, and one of
its prefill chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.kernels.mamba.layer import StateRows


def rows_of_windows(
    slots: Tensor, behind: Tensor, position_ids: Tensor, window: int, tokens: Tensor | None = None
) -> StateRows:
    """R decode rows with windows of ``window`` tokens.

    Args:
        slots: int64 ``[R]``; the null slot for padding and dead rows.
        behind: int64 ``[R]``, drafts of the last window that were accepted; negative for none.
        position_ids: int64 ``[T]``.
        tokens: int64 ``[R, window]``, which of the T tokens they are, T behind the last one of a
            row; None: token j of row r is ``r * window + j``.
    """
    if tokens is None:
        first = torch.arange(len(slots), device=slots.device) * window
        lengths = torch.full_like(slots, window)
    else:
        first = tokens[:, 0].clamp(max=len(position_ids) - 1)
        lengths = (tokens < len(position_ids)).sum(1)
    behind = behind.clamp(min=0)
    return StateRows(slots, first, lengths, position_ids[first], behind, torch.ones_like(slots))


def rows_of_chunks(
    slots: Tensor, offsets: Tensor, lengths: Tensor, position_ids: Tensor
) -> StateRows:
    """N prefill chunks of ``lengths`` tokens from token ``offsets`` on, int64 ``[N]``; those
    without tokens have the null slot."""
    first = offsets.clamp(max=len(position_ids) - 1)
    return StateRows(slots, first, lengths, position_ids[first], torch.zeros_like(slots), lengths)
