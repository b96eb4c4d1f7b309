"""Which tokens the MTP layers run over when a step drafts.

Draft d comes from layer l = min(d, layers - 1). With the last token that counts at position q, the
layer runs over the w tokens at q - w + 1 + l and behind, whose keys and values stand at q - w and
behind: at the same places in all layers. Column c of ``tokens`` is the token at q - w + 1 + c, so
layer l has columns l to l + w, and the last of these gives the draft.

That is all that a layer has to compute again. Its rows before were there when the step before
drafted, and their tokens, drafts then, have been accepted: layer l wrote l rows with drafts for
tokens, and w - 1 > l. Of its w rows those whose token came before this step are left out, as their
tokens are not new. A draft beyond the last layer is one row of that layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.runner.drafter import SampledRows
from megatron_async.runner.memory.attention_metadata import AttentionMetadata
from megatron_async.runner.memory.slot_state import SlotState


class DraftShape(NamedTuple):
    """``drafts`` drafts in each of ``rows`` rows, which bring windows of ``window`` tokens, from
    ``layers`` layers. There are no more layers than drafts, and no more drafts than the window has
    tokens but one."""

    rows: int
    window: int
    layers: int
    drafts: int

    def layer(self, draft: int) -> int:
        """The layer that gives a draft."""
        return min(draft, self.layers - 1)

    def width(self, draft: int) -> int:
        """Tokens of each row that the layer runs over."""
        return self.window if draft < self.layers else 1

    def columns(self, draft: int) -> slice:
        """Columns of :attr:`DraftRows.tokens` that it runs over."""
        end = self.window + draft
        return slice(end - self.width(draft), end)

    def span(self, draft: int) -> slice:
        """Where its tokens are in what :class:`DraftRows` has of all drafts' tokens."""
        whole = min(draft, self.layers) * self.window
        begin = self.rows * (whole + max(0, draft - self.layers))
        return slice(begin, begin + self.rows * self.width(draft))

    @property
    def size(self) -> int:
        """Tokens of all drafts."""
        end: int = self.span(self.drafts - 1).stop
        return end


class DraftRows(NamedTuple):
    """What the forwards of k drafts run over; N tokens, see :meth:`DraftShape.span`.

    Args:
        tokens: int64 [R, w + k], the last token that counts in column w - 1, room for drafts
            behind it. Columns in front of the row's first token hold anything.
        slots, positions, slot_mapping, lengths: int64 [N], as in ``AttentionMetadata``. Tokens that
            are left out have the null slot and position 0.
        sample_positions: int64 [k, R], of the drafts.
        inverse_temperature, top_k, top_p, seed: [R], with which they are sampled.
        lengths_host: the lengths on the host, where the device may be read.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    slot_mapping: Tensor
    lengths: Tensor
    sample_positions: Tensor
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    lengths_host: list[int] | None = None

    def metadata(self, shape: DraftShape, draft: int) -> AttentionMetadata:
        """Return the attention metadata of a draft's forward."""
        span = shape.span(draft)
        host = self.lengths_host
        return AttentionMetadata(
            self.positions[span],
            self.slots[span],
            self.slot_mapping[span],
            span.stop - span.start,
            self.lengths[span],
            None if host is None else host[span],
            window=shape.width(draft),
            has_gaps=True,
        )


def draft_rows(
    rows: SampledRows,
    state: SlotState,
    shape: DraftShape,
    *,
    block_size: int,
    null_slot: int,
    read_lengths: bool,
) -> DraftRows:
    """What the drafts behind ``rows`` run over.

    Args:
        read_lengths: the device may be read by the caller.
    """
    slots, sampled, last, first = rows
    _, window, layers, count = shape
    end = first + last
    column = torch.arange(window + count, device=slots.device)
    index = last[:, None] - (window - 1) + column
    tokens = sampled.gather(1, index.clamp(0, window - 1))
    layer = torch.arange(layers, device=slots.device)[:, None, None]
    places = (end - window)[:, None] + column[:window]
    is_new = index[None, :, :window] + layer >= 0
    blocks = state.block_table[slots]
    limits = slots, state.computed_from[slots], state.max_total[slots], null_slot
    # A dead row writes to the null block.
    blocks = blocks.masked_fill(state.finished[slots][:, None], NULL_BLOCK)
    parts = [_placed(places.expand(layers, -1, -1), is_new, blocks, *limits, block_size)]
    if count > layers:
        ahead = torch.arange(count - layers, device=slots.device)[:, None, None]
        further = end[None, :, None] + ahead
        parts.append(_placed(further, further >= 0, blocks, *limits, block_size))
    placed = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    lengths = placed[1] + 1
    behind = torch.arange(1, count + 1, device=slots.device)[:, None]
    of_rows = (state.inverse_temperature, state.top_k, state.top_p, state.seed)
    lengths_host = lengths.tolist() if read_lengths else None
    return DraftRows._make(
        [tokens, *placed, lengths, end + behind, *(each[slots] for each in of_rows), lengths_host]
    )


def _placed(
    positions: Tensor,
    is_new: Tensor,
    blocks: Tensor,
    slots: Tensor,
    computed_from: Tensor,
    max_total: Tensor,
    null_slot: int,
    block_size: int,
) -> Tensor:
    """Slots, positions and slot mapping, int64 [3, D * R * n], of tokens whose keys and values
    belong to ``positions`` [D, R, n] if they are new; ``blocks`` [R, columns] are the rows'."""
    valid = is_new & (positions >= computed_from[:, None]) & (slots != null_slot)[:, None]
    valid &= positions + 1 < max_total[:, None]
    positions = torch.where(valid, positions, 0)
    found = blocks.gather(1, (positions // block_size).transpose(0, 1).flatten(1))
    found = found.view(positions.shape[1], positions.shape[0], -1).transpose(0, 1)
    found = torch.where(valid, found, NULL_BLOCK)
    mapping = found * block_size + positions % block_size
    held = torch.where(valid, slots[:, None], null_slot)
    return torch.stack([held.flatten(), positions.flatten(), mapping.flatten()])
