"""Log-probabilities for trainers: the engine's values, and the gradient of a softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_async.errors import ConfigError
from megatron_async.training.log_probs import exact_log_probs


@pytest.mark.parametrize("options", ({}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5},
                                     {"temperature": 0.9, "top_p": 0.6}))  # fmt: skip
def test_log_probs_have_the_gradient_of_a_softmax(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 20, requires_grad=True)
    wide = (logits.detach() / options.get("temperature", 1.0)).double().requires_grad_(True)
    sorted_, order = wide.sort(-1, descending=True)
    before = sorted_.softmax(-1).cumsum(-1) - sorted_.softmax(-1)
    kept = torch.arange(20).expand_as(order) < (options.get("top_k") or 20)
    kept = kept & (before < options.get("top_p", 1.0))
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    tokens = wide.argmax(-1)
    expected = wide.masked_fill(~kept, -torch.inf).log_softmax(-1)
    expected = expected.gather(-1, tokens[..., None])[..., 0]
    found = exact_log_probs(logits, tokens, **options)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    weights = torch.randn(3, 4)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert wide.grad is not None and logits.grad is not None
    gradient = wide.grad / options.get("temperature", 1.0)
    assert torch.allclose(logits.grad.double(), gradient, atol=1e-6)


def test_padding_has_no_log_prob_and_no_gradient() -> None:
    """NaN there would be the loss's, whatever it is multiplied with."""
    logits = torch.randn(3, 5, requires_grad=True)
    found = exact_log_probs(logits, torch.tensor([1, -100, 2]))
    found.sum().backward()
    assert found[1] == 0 and bool((found[[0, 2]] < 0).all())
    assert logits.grad is not None and not logits.grad[1].any() and logits.grad[0].any()


def test_what_log_probs_do_not_take_is_refused() -> None:
    logits, tokens = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for wrong, said in (
        ({"tokens": tokens[:1]}, "one token for each position"),
        ({"top_k": 3}, "give a temperature"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e-40}, "too small to divide by"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k=2.5"),
        ({"tokens": tokens.float()}, "give integers"),
        ({"tokens": tokens + 3}, r"tokens hold 3 and the vocabulary is 0 .. 2: give -100"),
        ({"tokens": tokens + 2, "vocab_size": 2}, r"tokens hold 2 and the vocabulary is 0 .. 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
    ):
        with pytest.raises(ConfigError, match=said):
            exact_log_probs(**{"logits": logits, "tokens": tokens, **wrong})


@pytest.mark.parametrize(
    ("asked", "same"),
    (
        ({"temperature": 0.7, "top_k": 1}, {"temperature": 0.0}),  # greedy, to an engine
        ({"temperature": 0.7, "top_k": 2**33}, {"temperature": 0.7, "top_k": 2**31 - 1}),
    ),
)
def test_options_mean_what_they_mean_to_an_engine(
    asked: dict[str, Any], same: dict[str, Any]
) -> None:
    logits, tokens = torch.randn(4, 9), torch.arange(4)
    found = exact_log_probs(logits, tokens, **asked)
    assert torch.equal(found, exact_log_probs(logits, tokens, **same)) and bool(found.all())
