"""The next tokens from scores, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

INVALID = "probability tensor contains either `inf`, `nan` or element < 0"
"""What ``torch.multinomial`` says."""


MOST_PARTS = 96
"""A row of scores whose largest is looked for in parts has at most this many of them."""
LEAST_WIDTH = 4096


def select(scores: Tensor, sample: bool, *, in_parts: bool = False) -> tuple[Tensor, Tensor | None]:
    """Tokens, int64 ``(batch,)``, from scores, float ``(batch, vocabulary)``; when sampling, also
    the probabilities they were drawn from, which :func:`is_invalid` has to look at. ``in_parts``
    is for greedy steps of few rows that are compiled."""
    if not sample:
        return (largest(scores) if in_parts else torch.argmax(scores, dim=-1)), None
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
    width = scores.shape[-1]
    if width < LEAST_WIDTH:
        return torch.argmax(scores, dim=-1)
    parts = next((n for n in range(MOST_PARTS, 15, -1) if width % n == 0), None)
    if parts is None:
        parts = MOST_PARTS
        scores = torch.nn.functional.pad(scores, (0, -width % parts), value=-torch.inf)
    cut: Tensor = scores.unflatten(-1, (parts, -1))
    part = cut.amax(dim=-1).argmax(dim=-1, keepdim=True)
    place = part * cut.shape[-1] + cut.argmax(dim=-1).gather(-1, part)
    return place.squeeze(-1)
