"""Log-probabilities in torch: against float64, and what is listed for a position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.sampling import log_probs
from megatron_async.sampling.log_probs import (
    LogProbs,
    pack,
    processed_log_probs,
    token_log_probs,
    unpack,
)
from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from megatron_async.step.extras import LOG_PROB_WORDS, MAX_TOP_LOG_PROBS
from tests.unit.sampling.test_process_logits import on_gpu

TOLERANCE = 1e-5


def float64_log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ids with a probability, most likely first, the lower id first among equals."""
    exact = logits.double().log_softmax(1)
    order = logits.float().sort(dim=1, descending=True, stable=True).indices
    top = order[:, :MAX_TOP_LOG_PROBS]
    return exact.gather(1, tokens[:, None])[:, 0], top, exact.gather(1, top)


def assert_close(got: LogProbs, logits: Tensor, tokens: Tensor) -> None:
    log_prob, ids, listed = (t.cpu() for t in got)
    wanted, wanted_ids, wanted_listed = float64_log_probs(logits, tokens)
    width = wanted_ids.shape[1]
    is_listed = wanted_listed > -torch.inf
    assert torch.equal(ids[:, :width].long(), wanted_ids.masked_fill(~is_listed, -1))
    assert (ids[:, width:] == -1).all() and (listed[:, width:] == -torch.inf).all()
    torch.testing.assert_close(log_prob.double(), wanted, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(listed[:, :width].double(), wanted_listed, rtol=0, atol=TOLERANCE)


@given(
    st.integers(0, 2**32), st.sampled_from((1, 3, 20, 61, 3000)), st.floats(0.0, 80.0),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), st.booleans(),
)  # fmt: skip
@settings(max_examples=80)
def test_within_1e5_of_float64(
    seed: int, vocab_size: int, spread: float, dtype: torch.dtype, has_holes: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.rand(4, vocab_size, generator=generator) * 2 - 1) * spread
    logits = logits.to(dtype)
    if has_holes:
        holes = torch.rand(logits.shape, generator=generator) < 0.5
        holes[:, seed % vocab_size] = False
        logits.masked_fill_(holes, -torch.inf)
    tokens = torch.randint(vocab_size, (4,), generator=generator)
    assert_close(token_log_probs(logits, tokens), logits, tokens)


@pytest.mark.parametrize("spread", (0.0, 1.0, 10.0, 80.0))
def test_within_1e5_of_float64_over_a_large_vocabulary(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.rand(3, 128_256, generator=generator) * 2 - 1) * spread
    logits[2] = logits[2].clamp(min=0.9 * spread)  # most ids share most of the mass
    for tokens in (logits.argmin(1), torch.tensor([0, 128_255, 5])):
        assert_close(token_log_probs(logits, tokens), logits, tokens)


@on_gpu
def test_cuda_gives_the_cpus_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 61, 128_256):
        logits = (torch.randn(5, vocab_size, generator=generator) * 5).bfloat16()
        tokens = torch.randint(vocab_size, (5,), generator=generator)
        wanted = pack(*token_log_probs(logits, tokens))
        got = pack(*token_log_probs(logits.to(device), tokens.to(device)))
        assert torch.equal(got.cpu(), wanted)


def test_equal_logits_are_listed_by_their_ids() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 3::7] = -0.0
    logits[0, 70] = 1.0
    _, ids, _ = token_log_probs(logits, torch.tensor([0]))
    assert ids[0].tolist() == [70, *range(19)]


def test_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 61, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(9)
    whole = pack(*token_log_probs(logits, tokens))
    monkeypatch.setattr(log_probs, "ELEMENTS_AT_ONCE", 130)
    assert torch.equal(pack(*token_log_probs(logits, tokens)), whole)
    assert torch.equal(pack(*token_log_probs(logits[4:5], tokens[4:5])), whole[:, 4:5])


def test_rows_without_a_distribution_have_none() -> None:
    logits = torch.zeros(3, 61)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    log_prob, ids, listed = token_log_probs(logits, torch.tensor([1, 1, -1]))
    assert log_prob.isnan().all()
    assert listed[:2].isnan().all() and (ids[:2] == -1).all()
    assert ids[2].tolist() == list(range(20))


def test_no_rows_are_no_log_probabilities() -> None:
    log_prob, ids, listed = token_log_probs(torch.zeros(0, 61), torch.zeros(0, dtype=torch.int64))
    assert (log_prob.shape, ids.shape, listed.shape) == ((0,), (0, 20), (0, 20))


def test_infinite_logits_share_all_of_the_mass() -> None:
    logits = torch.zeros(1, 61)
    logits[0, 3] = logits[0, 9] = torch.inf
    log_prob, ids, _ = token_log_probs(logits, torch.tensor([9]))
    assert log_prob.item() == pytest.approx(-math.log(2)) and ids[0, :3].tolist() == [3, 9, 0]


def test_words_come_back() -> None:
    logits = torch.randn(7, 15, generator=torch.Generator().manual_seed(0))
    logits[2, 3] = torch.nan
    result = token_log_probs(logits, torch.arange(7))
    words = pack(*result)
    assert words.shape == (LOG_PROB_WORDS, 7) and words.dtype == torch.int32
    for got, wanted in zip(unpack(words.numpy()), result, strict=True):
        np.testing.assert_array_equal(got, wanted.numpy())


# --- of what is sampled from ------------------------------------------------------------------


def plain_filtered(row: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits in float64 with all but the kept ids removed, by sorting and adding."""
    scaled = row.double() / temperature
    order = scaled.argsort(descending=True).tolist()
    kept = order[: top_k or None]
    probabilities = scaled[kept].softmax(0).cumsum(0)
    if 0.0 < top_p < 1.0:
        kept = kept[: int((probabilities < top_p).sum()) + 1]
    filtered = torch.full_like(scaled, -torch.inf)
    filtered[kept] = scaled[kept]
    return filtered


@settings(max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from((0.5, 1.0, 2.0)), st.sampled_from((0, 1, 5, 40)),
    st.sampled_from((0.0, 0.3, 0.9)),
)  # fmt: skip
def test_filters_and_temperature_apply(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(3, 61, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 7] = -torch.inf
    filtered = torch.stack([plain_filtered(row, temperature, top_k, top_p) for row in logits])
    tokens = torch.tensor([int(filtered[0].argmax()), 7, int(logits[2].argmin())])
    got = processed_log_probs(
        logits,
        torch.full((3,), 1 / temperature),
        torch.full((3,), top_k, dtype=torch.int32),
        torch.full((3,), top_p),
        tokens,
    )
    assert_close(got, filtered, tokens)


def test_greedy_rows_have_temperature_one_and_no_filter() -> None:
    logits = torch.randn(4, 61, generator=torch.Generator().manual_seed(0))
    tokens = logits.argmax(1)
    filters = (torch.full((4,), 3, dtype=torch.int32), torch.full((4,), 0.2))
    got = processed_log_probs(logits, torch.zeros(4), *filters, tokens)
    assert torch.equal(pack(*got), pack(*token_log_probs(logits, tokens)))


def test_sampled_tokens_have_a_probability() -> None:
    rows = 64
    logits = torch.randn(1, 61, generator=torch.Generator().manual_seed(0)).expand(rows, -1)
    logits = logits.contiguous() * 3
    filters = (
        torch.full((rows,), 1.3),
        torch.full((rows,), 9, dtype=torch.int32),
        torch.full((rows,), 0.8),
    )
    tokens = sample_tokens_reference(
        logits, SampleInputs(*filters, torch.arange(rows), torch.arange(rows))
    )
    log_prob, ids, _ = processed_log_probs(logits, *filters, tokens)
    assert log_prob.isfinite().all()
    assert all(int(t) in listed for t, listed in zip(tokens, ids.tolist(), strict=True))
