"""The kernel of a token's log-probability, against the torch code, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from megatron_async.kernels.sampling import token_log_prob as kernel
from megatron_async.sampling.log_probs import token_log_probs
from megatron_async.training import exact_log_probs
from tests.support.interpreter import on_devices


def of_torch(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return token_log_probs(logits.cpu(), tokens.cpu())[0].to(logits.device)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of NaN there are several."""
    first, second = (x.nan_to_num(123.0, math.inf, -math.inf) for x in (found, expected))
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@on_devices
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 61, kernel.BLOCK, 2 * kernel.BLOCK + 7])
def test_bits_are_those_of_torch(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Rows lie in wider ones, as logits with padding do."""
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(9, vocab_size + 3, generator=generator) * torch.logspace(-2, 2, 9)[:, None]
    wide[3, : vocab_size // 2] = -math.inf
    wide[:, vocab_size:] = math.nan  # padding, which nobody reads
    logits = wide.to(dtype).to(device)[:, :vocab_size]
    tokens = torch.randint(vocab_size, (9,), generator=generator).to(device)
    tokens[4] = -100
    assert kernel.takes(logits)
    found, expected = kernel.token_log_prob(logits, tokens), of_torch(logits, tokens)
    assert same_bits(found, expected)
    assert found[4].isnan() and found.isnan().sum() == 1


@on_devices
def test_rows_that_have_no_probabilities(device: str) -> None:
    size = kernel.BLOCK + 5
    logits = torch.zeros(6, size, device=device)
    logits[0, -1] = math.nan
    logits[1] = -math.inf
    logits[2, 7] = math.inf
    logits[3, 7] = -math.inf
    logits[4] = -0.0
    logits[5, 1] = 3e38
    tokens = torch.full((6,), 7, device=device)
    found, expected = kernel.token_log_prob(logits, tokens), of_torch(logits, tokens)
    assert same_bits(found, expected)
    assert found.isnan().tolist() == [True, True, False, False, False, False]
    assert found[3] == -math.inf and found[4] == found[4] != 0


@on_devices
def test_what_it_does_not_take_goes_to_torch(device: str) -> None:
    logits = torch.randn(3, 50, dtype=torch.float64, device=device)
    tokens = torch.tensor([1, 2, 49], device=device)
    assert not kernel.takes(logits) and not kernel.takes(torch.zeros(4, 6).t())
    for given in (logits, logits.float()):
        assert same_bits(exact_log_probs(given, tokens), of_torch(given, tokens))
    assert kernel.token_log_prob(logits.float()[:0], tokens[:0]).shape == (0,)
