"""Token sampling on the CPU: the reference's result, with work only for what each row asks."""

from __future__ import annotations

from torch import Tensor, empty_like, float32, full_like, inf

from megatron_async.sampling import filters, noise
from megatron_async.sampling.sample import SampleInputs

NUCLEUS_PREFIX = 128
"""Top-p looks at this many of the largest logits before it sorts the whole row."""


def sample_tokens_cpu(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """``sampling.sample_tokens`` of CPU tensors; arguments are not checked."""
    failed = logits.amax(1).isnan()
    if failed.any():
        tokens = sample_tokens_cpu(filters.without_nan(logits), inputs)
        return tokens.masked_fill_(failed, -1)
    x = logits.to(float32)
    sampled = inputs.inverse_temperature > 0.0
    if not sampled.any():
        return x.argmax(1)
    asks_top_k = filters.top_k_enabled(inputs.top_k, x.shape[1])
    filtered = sampled & (asks_top_k | filters.top_p_enabled(inputs.top_p))
    tokens = empty_like(inputs.seed)
    for members, sample_group in (
        (~sampled, _greedy),
        (sampled & ~filtered, _sample_unfiltered),
        (filtered, _sample_filtered),
    ):
        if members.all():
            return sample_group(x, inputs)
        rows = members.nonzero()[:, 0]
        if rows.numel():
            tokens[rows] = sample_group(x[rows], inputs.of_rows(rows))
    return tokens


def _greedy(x: Tensor, inputs: SampleInputs) -> Tensor:
    return x.argmax(1)


def _sample_unfiltered(x: Tensor, inputs: SampleInputs) -> Tensor:
    scores = filters.scale_logits(x, inputs.inverse_temperature)
    scores.add_(noise.gumbel(inputs.seed, inputs.position, x.shape[1]))
    return scores.masked_fill_(x == -inf, -inf).argmax(1)


def _sample_filtered(x: Tensor, inputs: SampleInputs) -> Tensor:
    """Noise only for the ids that the filters keep, usually few."""
    factor, top_k, top_p, seed, position = inputs
    threshold = _filter_threshold(x, factor, top_k, top_p)
    rows, ids = ((x >= threshold[:, None]) & (x > -inf)).nonzero(as_tuple=True)
    scaled = filters.scale_logits(x[rows, ids][:, None], factor[rows])[:, 0]
    scores = full_like(x, -inf)
    scores[rows, ids] = scaled.add_(noise.gumbel_at(seed[rows], position[rows], ids))
    return scores.argmax(1)


def _filter_threshold(x: Tensor, factor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``filters.filter_threshold``, from the largest logits alone where those suffice."""
    vocab_size = x.shape[1]
    k_max = int(top_k.masked_fill(~filters.top_k_enabled(top_k, vocab_size), 1).max())
    nucleus = bool(filters.top_p_enabled(top_p).any())
    size = min(max(k_max, NUCLEUS_PREFIX if nucleus else 1), vocab_size)
    prefix = x.topk(size, dim=1).values
    top_k_logit = filters.top_k_threshold(prefix, top_k, vocab_size)
    if not nucleus:
        return top_k_logit
    mass = filters.probability_mass(x, factor, prefix[:, 0])
    total = mass.masked_fill_(x < top_k_logit[:, None], 0).sum(1)
    prefix_mass = filters.probability_mass(prefix, factor, prefix[:, 0])
    threshold, found = filters.top_p_threshold(prefix, prefix_mass, total, top_p, top_k_logit)
    if found.all():
        return threshold
    return filters.filter_threshold(x, factor, top_k, top_p)
