"""Drafts by prompt look-up: what followed when the last tokens of a request came before.

The tokens of all slots stay on the device, so that a look-up waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_async.device.memory import must_fit
from megatron_async.runner.drafter import MixedTokens, SampledRows
from megatron_async.runner.memory.forward_batch import ForwardBatch

LONGEST = 4
"""Most tokens that are compared; the longer the match, the better it is, and then the later."""


class NgramDrafter:
    """Drafts from the request's own tokens.

    A row whose last token is new to its request has drafts that are not accepted.
    """

    wants_tokens = True

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        slots, length = batch.slot_count + 1, batch.max_sequence_length
        with must_fit(
            batch.device,
            4 * slots * length,
            f"the tokens of {slots} slots for prompt look-up",
            "max_requests, depth or max_sequence_length",
        ):
            self._tokens = torch.zeros(slots, length, dtype=torch.int32, device=batch.device)
        self._places = torch.arange(length, device=batch.device)

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        known = torch.tensor(tokens, dtype=torch.int32, pin_memory=self._tokens.is_cuda)
        self._tokens[slot, : len(tokens)].copy_(known, non_blocking=True)

    def hidden_states(self, count: int) -> None:
        return None

    def prefill(self, tokens: MixedTokens, hidden_states: Tensor | None) -> None:
        pass

    def draft(self, rows: SampledRows, count: int) -> Tensor:
        slots, tokens, last, first = rows
        index = torch.arange(tokens.shape[1], device=slots.device)
        counts = (index <= last[:, None]) & (slots != self._batch.null_slot)[:, None]
        target = torch.where(counts, slots[:, None], self._batch.null_slot)
        at = torch.where(counts, first[:, None] + index, 0)
        self._tokens[target, at] = torch.where(counts, tokens, 0).int()
        end = first + last
        if not count:
            return end.new_empty(len(end), 0)
        return look_up(self._tokens[slots], end, self._places, count)


def look_up(history: Tensor, end: Tensor, places: Tensor, count: int) -> Tensor:
    """What followed the longest earlier match of each row's last tokens.

    Args:
        history: int32 [R, L]; those up to ``end`` count.
        end: int64 [R], the place of the last token.
        places: int64 [L], 0 to L - 1.

    Returns:
        int64 [R, count]. What goes beyond the last token repeats from the match on. Without a match
        the last token is repeated.
    """
    length = history.shape[1]
    alike = (places < end[:, None]).long()
    score = torch.zeros_like(alike)
    for back in range(LONGEST):
        wanted = history.gather(1, (end[:, None] - back).clamp(min=0))
        same = (history == wanted) & (end[:, None] >= back)
        # Place j matches so far if the token ``back`` places before it is the wanted one.
        alike = alike * torch.nn.functional.pad(same, (back, 0))[:, :length]
        score += alike
    best = (score * length + places * (score > 0)).argmax(1)
    found = score.gather(1, best[:, None])[:, 0] > 0
    best = torch.where(found, best, end - 1).clamp(min=0)
    period = (end - best).clamp(min=1)[:, None]
    ahead = torch.arange(count, device=history.device) % period
    drafts = history.gather(1, best[:, None] + 1 + ahead)
    return torch.where(found[:, None], drafts, history.gather(1, end[:, None])).long()
