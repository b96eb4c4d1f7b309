"""Top-k and nucleus thresholds of a row of logits, exact and independent of any order.

Top-k is from Fan et al., "Hierarchical Neural Story Generation" (ACL 2018), top-p from Holtzman
et al., "The Curious Case of Neural Text Degeneration" (ICLR 2020). Both are expressed as the
smallest logit that stays, so that equal logits stay or go together. Probabilities are integer
masses (``exact_math.exp2_mass``), compared as integers.

Logits here are float32 without NaN. ``-inf`` marks an id that is no candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.sampling import exact_math

SCALED_LIMIT = 2.0**100
"""Bound on the magnitude of a logit times an inverse temperature; beyond it values are equal."""
TOP_P_BITS = 30
"""``top_p`` is truncated to a multiple of ``2**-TOP_P_BITS`` and is at least one of them."""


def without_nan(logits: Tensor) -> Tensor:
    """Logits of any shape as float32 with NaN replaced by ``-inf``; infinities stay."""
    return torch.nan_to_num(
        logits.to(torch.float32), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )


def scale_logits(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """``logits * inverse_temperature``, finite: ``[R, M]`` float32 times positive ``[R]``."""
    factor = inverse_temperature.clamp(max=SCALED_LIMIT)
    return (logits * factor[:, None]).clamp_(-SCALED_LIMIT, SCALED_LIMIT)


def top_k_enabled(top_k: Tensor, vocab_size: int) -> Tensor:
    """Rows of int32 ``[R]`` whose top-k removes something: bool ``[R]``."""
    return (top_k > 0) & (top_k < vocab_size)


def top_p_enabled(top_p: Tensor) -> Tensor:
    """Rows of float32 ``[R]`` whose top-p removes something: bool ``[R]``; NaN is off."""
    return (top_p > 0.0) & (top_p < 1.0)


def probability_mass(logits: Tensor, inverse_temperature: Tensor, row_max: Tensor) -> Tensor:
    """Unnormalised probabilities: int64 ``[R, M]``, ``2**MASS_BITS`` for the row's maximum.

    Args:
        logits: float32 ``[R, M]``, any part of a row.
        inverse_temperature: float32 ``[R]``, positive.
        row_max: float32 ``[R]``, the largest logit of the whole row.
    """
    scaled = scale_logits(logits, inverse_temperature)
    scaled_max = scale_logits(row_max[:, None], inverse_temperature)
    return exact_math.exp2_mass(scaled.sub_(scaled_max).mul_(exact_math.LOG2_E))


def nucleus_mass(total: Tensor, top_p: Tensor) -> Tensor:
    """``ceil(top_p * total)`` in exact integers: int64 ``[R]``.

    Args:
        total: int64 ``[R]``, at most ``2**62``.
        top_p: float32 ``[R]``, read as described at ``TOP_P_BITS``.
    """
    one = 1 << TOP_P_BITS
    units = (top_p * float(one)).clamp_(1.0, float(one)).to(torch.int64)
    high, low = total >> TOP_P_BITS, total & (one - 1)
    return high * units + ((low * units + (one - 1)) >> TOP_P_BITS)


def top_k_threshold(sorted_logits: Tensor, top_k: Tensor, vocab_size: int) -> Tensor:
    """The ``top_k``-th largest logit of each row, ``-inf`` where top-k is off: float32 ``[R]``.

    Args:
        sorted_logits: float32 ``[R, M]``, the row's ``M`` largest logits, descending, with
            ``M`` at least each enabled ``top_k``.
        top_k: int32 ``[R]``.
        vocab_size: number of candidates a row has.
    """
    index = top_k.to(torch.int64).clamp(1, sorted_logits.shape[1]) - 1
    kth = sorted_logits.gather(1, index[:, None])[:, 0]
    return kth.masked_fill(~top_k_enabled(top_k, vocab_size), -torch.inf)


def top_p_threshold(
    sorted_logits: Tensor,
    sorted_mass: Tensor,
    total: Tensor,
    top_p: Tensor,
    top_k_logit: Tensor,
) -> tuple[Tensor, Tensor]:
    """The smallest logit of the smallest set of largest logits whose mass is ``top_p * total``.

    Args:
        sorted_logits: float32 ``[R, M]``, the row's ``M`` largest logits, descending.
        sorted_mass: int64 ``[R, M]``, their masses.
        total: int64 ``[R]``, the mass of all logits at or above ``top_k_logit``.
        top_p: float32 ``[R]``.
        top_k_logit: float32 ``[R]``, the result of ``top_k_threshold``.

    Returns:
        threshold: float32 ``[R]``, ``top_k_logit`` where top-p is off.
        found: bool ``[R]``, false where ``M`` logits were too few to tell.
    """
    cumulative = sorted_mass.cumsum(1)
    below = cumulative < nucleus_mass(total, top_p)[:, None]
    index = below.sum(1, keepdim=True)
    found = index[:, 0] < sorted_logits.shape[1]
    logit = sorted_logits.gather(1, index.clamp_(max=sorted_logits.shape[1] - 1))[:, 0]
    enabled = top_p_enabled(top_p)
    threshold = torch.where(enabled, torch.maximum(logit, top_k_logit), top_k_logit)
    return threshold, found | ~enabled


def filter_threshold(
    logits: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The smallest logit of each row that top-k and then top-p keep: float32 ``[R]``.

    Args:
        logits: float32 ``[R, V]``, without NaN.
        inverse_temperature: float32 ``[R]``, positive.
        top_k: int32 ``[R]``.
        top_p: float32 ``[R]``.
    """
    ordered = logits.sort(1, descending=True).values
    top_k_logit = top_k_threshold(ordered, top_k, logits.shape[1])
    mass = probability_mass(ordered, inverse_temperature, ordered[:, 0])
    total = mass.masked_fill(ordered < top_k_logit[:, None], 0).sum(1)
    return top_p_threshold(ordered, mass, total, top_p, top_k_logit)[0]
