"""The rank of a token among all."""

from __future__ import annotations

import pytest
import torch

from megatron_async.sampling.log_probs import token_log_probs, token_ranks


@pytest.mark.parametrize("vocab_size", [1, 5, 61, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_is_the_place_in_the_order_of_log_probs(vocab_size: int, dtype: torch.dtype) -> None:
    """Ties, of which bfloat16 has many, are in the order of the ids."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(6, vocab_size, generator=generator) * 2).to(dtype)
    tokens = torch.randint(vocab_size, (6,), generator=generator)
    ranks = token_ranks(logits, tokens).tolist()
    order = logits.double().sort(dim=1, descending=True, stable=True).indices
    assert ranks == [order[n].tolist().index(token) + 1 for n, token in enumerate(tokens.tolist())]


def test_ranks_agree_with_the_most_likely_tokens() -> None:
    logits = torch.zeros(1, 61)
    logits[0, 3::7] = -0.0
    logits[0, 40] = 1.0
    _, (top,), _ = token_log_probs(logits, torch.tensor([0]))
    for place, token in enumerate(top.tolist(), start=1):
        assert token_ranks(logits, torch.tensor([token])).tolist() == [place]


def test_a_row_with_nan_has_no_ranks() -> None:
    logits = torch.zeros(2, 7)
    logits[0, 5] = torch.nan
    assert token_ranks(logits, torch.tensor([1, 1])).tolist() == [0, 2]
