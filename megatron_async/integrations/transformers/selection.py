"""The next tokens from scores, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.integrations.transformers.row_forward import TRIAL

INVALID = "probability tensor contains either `inf`, `nan` or element < 0"
"""What ``torch.multinomial`` says."""


def select(scores: Tensor, sample: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens, int64 ``(batch,)``, from scores, float ``(batch, vocabulary)``; when sampling, also
    the probabilities they were drawn from, which :func:`is_invalid` has to look at."""
    if not sample:
        return largest(scores), None
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    return draw(probabilities), probabilities


def draw(probabilities: Tensor) -> Tensor:
    """The token that ``torch.multinomial`` draws, from the same random numbers.

    ``torch.multinomial`` first waits for the device, to look whether the probabilities are finite.
    Its draw is the largest quotient of a probability and an exponential variate.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def is_invalid(probabilities: Tensor) -> Tensor:
    """Whether ``torch.multinomial`` would refuse them; bool, a scalar on the device."""
    return ~((probabilities.max() < torch.inf) & (probabilities.min() >= 0))


def largest(scores: Tensor) -> Tensor:
    """``argmax`` over the last dimension, the first of equals, in two steps: one over parts of a
    row, which run side by side."""
    parts = next((n for n in (96, 64, 48, 37, 33, 32, 29) if scores.shape[-1] % n == 0), 1)
    if "argmax" not in TRIAL or scores.shape[-1] < 4096:
        return torch.argmax(scores, dim=-1)
    size = -(-scores.shape[-1] // 64)
    if parts == 1:
        scores = torch.nn.functional.pad(
            scores, (0, 64 * size - scores.shape[-1]), value=-torch.inf
        )
        parts = 64
    cut = scores.reshape(scores.shape[0], parts, -1)
    best = cut.argmax(dim=-1)
    part = cut.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (part * cut.shape[-1] + best.gather(1, part))[:, 0]
