"""The next tokens from scores, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

INVALID = "probability tensor contains either `inf`, `nan` or element < 0"
"""What ``torch.multinomial`` says."""


def select(scores: Tensor, sample: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens, int64 ``(batch,)``, from scores, float ``(batch, vocabulary)``; when sampling, also
    the probabilities they were drawn from, which :func:`is_invalid` has to look at."""
    if not sample:
        return torch.argmax(scores, dim=-1), None
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
