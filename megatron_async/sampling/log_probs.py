"""Log-probabilities of tokens, and the most likely ones, the same bits on every device.

With the row's maximum m and the sum of its integer masses (``exact_math.exp2_mass``), which depends
on no order, ``log p(x) = (x - m) - log(total)``, the rounding error of ``x - m`` included.

The rules shared by all implementations:

- Most likely first; of equal logits the lower id. Ids without probability are not listed.
- Logits are bounded in magnitude as in the sampler (``filters.SCALED_LIMIT``); ``-inf`` stays.
- A row with NaN, or of ``-inf`` alone, has NaN for log-probabilities and lists no id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_async.sampling import exact_math, filters
from megatron_async.step.extras import LOG_PROB_WORDS, MAX_TOP_LOG_PROBS

ELEMENTS_AT_ONCE = 1 << 24
"""Rows are done in groups of about this many logits, to bound the memory of a long prompt."""
_ID_MASK = 2**31 - 1

LogProbs = tuple[Tensor, Tensor, Tensor]


def token_log_probs(logits: Tensor, tokens: Tensor) -> LogProbs:
    """Compute log-probabilities of the model's logits.

    Args:
        logits: ``[N, V]`` of any float type.
        tokens: int64 ``[N]``; a negative one has a log-probability of NaN.

    Returns:
        The tokens' log-probabilities, float32 ``[N]``; the ids of the most likely tokens, int32
        ``[N, MAX_TOP_LOG_PROBS]``, -1 where there are no more; their log-probabilities, float32,
        ``-inf`` there.
    """
    factor = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    return _log_probs(logits, factor, torch.full_like(factor, -torch.inf), tokens)


def token_log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """The first of :func:`token_log_probs`, without the most likely tokens."""
    factor = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    threshold = torch.full_like(factor, -torch.inf)
    return _log_probs(logits, factor, threshold, tokens, listed=0)[0]


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Count how many tokens are at least as likely, from 1 for the most likely one; of equal logits
    the lower id goes first.

    Args:
        logits: ``[N, V]`` of any float type.
        tokens: int64 ``[N]``.

    Returns:
        int32 ``[N]``; 0 where the row has NaN.
    """
    own = logits.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids <= tokens[:, None]))
    return ahead.sum(1, dtype=torch.int32).masked_fill_(logits.isnan().any(1), 0)


def token_entropies(logits: Tensor) -> Tensor:
    """Compute the entropy of the model's distribution in each row, in nats.

    Args:
        logits: ``[N, V]`` of any float type.

    Returns:
        float32 ``[N]``; NaN where :func:`token_log_probs` has it.
    """
    found: Tensor = torch.special.entr(logits.float().softmax(1)).sum(1)
    return found


def processed_log_probs(
    processed: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, tokens: Tensor
) -> LogProbs:
    """Compute log-probabilities of what is sampled from: temperature, top-k and top-p applied;
    greedy rows have temperature 1 and no filter.

    Args:
        processed: float32 ``[N, V]``, of ``process_logits``.
        inverse_temperature, top_k, top_p: ``[N]``, as for ``sample_tokens``.
        tokens: as for :func:`token_log_probs`.

    Returns:
        As :func:`token_log_probs`.
    """
    factor, threshold = _sampled_from(processed, inverse_temperature, top_k, top_p)
    return _log_probs(processed, factor, threshold, tokens)


def processed_log_prob(
    processed: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, tokens: Tensor
) -> Tensor:
    """The first of :func:`processed_log_probs`, without the most likely tokens."""
    factor, threshold = _sampled_from(processed, inverse_temperature, top_k, top_p)
    return _log_probs(processed, factor, threshold, tokens, listed=0)[0]


def _sampled_from(
    processed: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors and thresholds ``[N]`` of rows, of which greedy ones have 1 and none."""
    sampled = inverse_temperature > 0.0
    factor = torch.where(sampled, inverse_temperature, 1.0)
    x = filters.without_nan(processed)
    threshold = filters.filter_threshold(x, factor, top_k, top_p)
    return factor, threshold.masked_fill(~sampled, -torch.inf)


def pack(log_prob: Tensor, top_ids: Tensor, top_log_probs: Tensor) -> Tensor:
    """The words of a record, int32 ``[LOG_PROB_WORDS, N]``, of a :data:`LogProbs`."""
    words = (log_prob.view(torch.int32)[:, None], top_ids, top_log_probs.view(torch.int32))
    return torch.cat(words, dim=1).T


def unpack(
    words: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """What :func:`pack` took, of its words on the host, int32 ``[LOG_PROB_WORDS, N]``."""
    columns = np.ascontiguousarray(words.T)
    assert columns.shape[1] == LOG_PROB_WORDS
    ids = columns[:, 1 : 1 + MAX_TOP_LOG_PROBS]
    log_probs = np.ascontiguousarray(columns[:, 1 + MAX_TOP_LOG_PROBS :]).view(np.float32)
    return np.ascontiguousarray(columns[:, 0]).view(np.float32), ids, log_probs


def _log_probs(
    logits: Tensor,
    factor: Tensor,
    threshold: Tensor,
    tokens: Tensor,
    listed: int = MAX_TOP_LOG_PROBS,
) -> LogProbs:
    """Compute them of the logits at or above ``threshold``, times ``factor``, both float32
    ``[N]``, with the ``listed`` most likely tokens."""
    size = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    groups = []
    for first in range(0, max(1, len(logits)), size):
        x, own, least, of = (t[first : first + size] for t in (logits, factor, threshold, tokens))
        groups.append(_log_probs_of_group(x, own, least, of, listed))
    if len(groups) == 1:
        return groups[0]
    log_prob, top_ids, top_log_probs = (torch.cat(parts) for parts in zip(*groups, strict=True))
    return log_prob, top_ids, top_log_probs


def _log_probs_of_group(
    logits: Tensor, factor: Tensor, threshold: Tensor, tokens: Tensor, listed: int
) -> LogProbs:
    x = logits.to(torch.float32)
    largest = x.amax(1, keepdim=True)
    failed = largest.isnan() | (largest == -torch.inf)
    x = x.masked_fill(failed, 0.0)
    # Zeros lose their sign: a maximum may be either of them.
    scaled = filters.scale_logits(x, factor) + 0.0
    scaled_max = scaled.amax(1, keepdim=True)
    kept = (x >= threshold[:, None]) & (x > -torch.inf)
    mass = exact_math.exp2_mass((scaled - scaled_max).mul_(exact_math.LOG2_E))
    total = mass.masked_fill_(~kept, 0).sum(1, keepdim=True)
    log_total = exact_math.log(total.to(torch.float32) * 2.0**-exact_math.MASS_BITS)

    def log_prob_of(ids: Tensor) -> Tensor:
        """Return those of ids int64 ``[N, M]``; of a negative id anything."""
        at = ids.clamp(min=0)
        difference, error = _subtract(scaled.gather(1, at), scaled_max)
        log_prob = difference - (log_total - error)
        return log_prob.masked_fill(~kept.gather(1, at), -torch.inf)

    top_ids = _most_likely(x, kept, listed).masked_fill(failed, -1)
    top_log_probs = log_prob_of(top_ids).masked_fill(top_ids < 0, -torch.inf)
    fill = listed - top_ids.shape[1]
    top_ids = torch.nn.functional.pad(top_ids, (0, fill), value=-1).to(torch.int32)
    top_log_probs = torch.nn.functional.pad(top_log_probs, (0, fill), value=-torch.inf)
    log_prob = log_prob_of(tokens[:, None]).masked_fill(failed | (tokens < 0)[:, None], torch.nan)
    return log_prob[:, 0], top_ids, top_log_probs.masked_fill(failed, torch.nan)


def _subtract(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a - b`` rounded, and what the rounding took off (Knuth's two-sum)."""
    difference = a - b
    subtracted = difference - a
    return difference, (a - (difference - subtracted)) - (b + subtracted)


def _most_likely(x: Tensor, kept: Tensor, count: int) -> Tensor:
    """The ids of the ``count`` largest ``x`` float32 ``[N, V]`` that are kept, then -1: int64."""
    if not count:
        return torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
    bits = x.view(torch.int32)
    key = torch.where(x == 0.0, 0, bits ^ ((bits >> 31) & _ID_MASK)).long()
    ids = torch.arange(x.shape[1], device=x.device)
    # No two are equal, so that no order is left to chance.
    packed = ((key << 32) | (ids ^ _ID_MASK)).masked_fill_(~kept, -(2**63))
    best = packed.topk(min(count, x.shape[1]), dim=1).values
    return torch.where(best == -(2**63), -1, (best & _ID_MASK) ^ _ID_MASK)
