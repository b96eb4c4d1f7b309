"""The hash model as the drafter of another one."""

from __future__ import annotations

import torch

from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.hash_model import HashModel


class PositionBehindTableError(AssertionError):
    """A position was looked up that the drafter's table lacks."""


class HashDraftModel(HashModel):
    """Knows the next tokens of ``model``, but errs about a share of them. Its table has ``limit``
    positions: a row that reads one behind them is an error.

    Args:
        error_rate: the share of (token, position) after which its likeliest token is another.
    """

    def __init__(self, model: HashModel, limit: int, error_rate: float) -> None:
        super().__init__()
        self.salt = model.salt
        self.max_sequence_length = limit
        self._errors_of_997 = round(997 * error_rate)

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardBatch
    ) -> torch.Tensor:
        last = int(position_ids.max())
        if last >= self.max_sequence_length:
            raise PositionBehindTableError(f"{last} of {self.max_sequence_length}")
        logits = super().forward(token_ids, position_ids, context)
        errs = (7919 * token_ids + 104_729 * position_ids) % 997 < self._errors_of_997
        if context.last_token_index is not None:
            errs = errs[context.last_token_index]
        return torch.where(errs[:, None], logits.roll(1, dims=1), logits)
