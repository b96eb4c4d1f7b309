"""Token sampling as a pure function of (logits row, parameters, seed, position).

A token is the argmax of ``logit / temperature`` plus Gumbel noise (Gumbel 1954; Maddison et al.,
"A* Sampling", NeurIPS 2014) whose bits come from a counter. It depends on nothing else: not on
the batch, the row, the device or what was sampled before, so nothing is ever rewound.

The rules shared by all implementations:

- A row with a NaN gives token -1: the model has failed. Ids with ``-inf`` are never chosen unless
  the whole row is ``-inf``, which gives token 0.
- Equal scores go to the lowest id.
- ``inverse_temperature`` not above zero is greedy and ignores the filters; ``top_k <= 0`` or at
  least the vocabulary is off; ``top_p <= 0`` or ``>= 1`` is off. NaN parameters are off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.sampling import filters, noise

MAX_VOCAB_SIZE = 1 << 19
"""Beyond this the integer masses of a row could overflow."""

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SampleInputs(NamedTuple):
    """What a token of each row follows from besides its logits, ``[R]`` each.

    Args:
        inverse_temperature: float32; 0 is greedy.
        top_k: int32; 0 is off.
        top_p: float32; 0 and 1 are off.
        seed: int64, the request's.
        position: int64, the index of the sampled token in its sequence.
    """

    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor

    def of_rows(self, rows: Tensor) -> SampleInputs:
        """Return those of some rows."""
        return SampleInputs(*[tensor[rows] for tensor in self])


def sample_tokens_reference(
    logits: Tensor,
    inputs: SampleInputs,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """``runner.sampler.sample_tokens`` in plain torch on any device, all work for every row."""
    inverse_temperature, top_k, top_p, seed, position = inputs
    logits = candidates(logits, vocab_size)
    x = filters.without_nan(logits)
    sampled = inverse_temperature > 0.0
    factor = torch.where(sampled, inverse_temperature, 1.0)
    threshold = filters.filter_threshold(x, factor, top_k, top_p)
    scores = filters.scale_logits(x, factor) + noise.gumbel(seed, position, x.shape[1])
    dropped = (x < threshold[:, None]) | (x == -torch.inf)
    scores = scores.masked_fill(dropped, -torch.inf)
    tokens = torch.where(sampled[:, None], scores, x).argmax(1)
    return tokens.masked_fill(logits.isnan().any(1), -1)


def candidates(logits: Tensor, vocab_size: int | None = None) -> Tensor:
    """The logits of the first ``vocab_size`` ids.

    Raises:
        ValueError: a shape, a dtype or the vocabulary size is not supported.
    """
    if logits.dim() != 2 or logits.dtype not in _LOGIT_DTYPES:
        raise ValueError(
            f"logits must be [rows, vocabulary] of float32, bfloat16 or float16; got "
            f"{tuple(logits.shape)} of {logits.dtype}"
        )
    size = logits.shape[1] if vocab_size is None else vocab_size
    if not 1 <= size <= min(logits.shape[1], MAX_VOCAB_SIZE):
        raise ValueError(
            f"vocab_size {size} must be at least 1, at most the {logits.shape[1]} columns of "
            f"logits and at most {MAX_VOCAB_SIZE}"
        )
    return logits[:, :size]


_DTYPES = (torch.float32, torch.int32, torch.float32, torch.int64, torch.int64)


def check_inputs(logits: Tensor, inputs: SampleInputs) -> None:
    """Raises :class:`ValueError` unless the inputs are as ``sample_tokens`` takes them."""
    for name, tensor, dtype in zip(SampleInputs._fields, inputs, _DTYPES, strict=True):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} of shape [{logits.shape[0]}]; got {tensor.dtype} of "
                f"shape {list(tensor.shape)}"
            )
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}")
