"""Sampled tokens have the distribution that is asked for: chi-square against the exact one.

Seeds are fixed, so no verdict is left to chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling.process_logits import process_logits
from megatron_async.sampling.sample import SampleInputs
from megatron_async.step.extras import NO_EXTRAS, Extras, SlotExtras

DRAWS = 20_000
LOGITS = (2.0, 1.5, 1.5, 0.4, 0.0, -0.3, -1.0, -1.1, -2.0, -2.5, -3.0, 0.9)
TOKENS = (0, 3, 11, 1, 1, 4, 1, 2)
PROMPT_LENGTH = 3
Z = 3.1
"""Of a normal distribution: one verdict in a thousand would be wrong if seeds were drawn."""


@dataclass(frozen=True)
class Ask:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    extras: Extras = NO_EXTRAS


def exact_probabilities(ask: Ask) -> list[float]:
    """From the definitions, in double precision."""
    extras, output = ask.extras, Counter(TOKENS[PROMPT_LENGTH:])
    bias = dict(extras.bias)
    scores = []
    for token, logit in enumerate(LOGITS):
        x = logit + bias.get(token, 0.0)
        if token in TOKENS:
            penalty = extras.repetition_penalty
            x = x / penalty if x > 0 else x * penalty
        x -= extras.frequency_penalty * output[token]
        x -= extras.presence_penalty * (token in output)
        scores.append(-math.inf if token in extras.banned else x / ask.temperature)
    weights = [math.exp(score) for score in scores]
    ranked = sorted(range(len(LOGITS)), key=lambda token: -weights[token])
    kept = [token for token in ranked if weights[token] >= extras.min_p * weights[ranked[0]]]
    if ask.top_k:
        least = weights[ranked[ask.top_k - 1]]
        kept = [token for token in kept if weights[token] >= least]
    if ask.top_p:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= ask.top_p * total:
                break
        # Ids as likely as the last of them stay as well.
        kept = [token for token in kept if weights[token] >= weights[nucleus[-1]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]


def draw(ask: Ask, seeds: Tensor, positions: Tensor) -> list[int]:
    """How often each token is sampled, with these seeds and positions."""
    rows = len(seeds)
    tables = ExtrasTables(1, len(LOGITS), 100, torch.device("cpu"))
    tables.admit(0, SlotExtras(ask.extras, PROMPT_LENGTH, TOKENS))
    factor = torch.tensor([1.0 / ask.temperature])
    at = torch.tensor([0]), torch.tensor([len(TOKENS)])
    processed = process_logits(torch.tensor([LOGITS]), tables, *at, factor)
    tokens = sample_tokens(
        processed.expand(rows, -1).contiguous(),
        SampleInputs(
            factor.expand(rows).contiguous(),
            torch.full((rows,), ask.top_k, dtype=torch.int32),
            torch.full((rows,), ask.top_p),
            seeds,
            positions,
        ),
    )
    return tokens.bincount(minlength=len(LOGITS)).tolist()


def excess(counts: list[int], probabilities: list[float]) -> float:
    """Chi-square as a normal deviate (Wilson and Hilferty, 1931)."""
    draws = sum(counts)
    possible = [(c, p * draws) for c, p in zip(counts, probabilities, strict=True) if p > 0.0]
    chi_square = sum((count - expected) ** 2 / expected for count, expected in possible)
    spread = 2.0 / (9.0 * (len(possible) - 1))
    return ((chi_square / (len(possible) - 1)) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread)


ASKS = {
    "plain": Ask(),
    "cold": Ask(temperature=0.5),
    "hot": Ask(temperature=2.5),
    "top-k": Ask(top_k=5),
    "top-p": Ask(top_p=0.8),
    "top-k and top-p": Ask(temperature=1.4, top_k=7, top_p=0.9),
    "min-p": Ask(extras=Extras(min_p=0.15)),
    "min-p of a hot row": Ask(temperature=2.0, extras=Extras(min_p=0.3)),
    "min-p and top-p": Ask(top_p=0.85, extras=Extras(min_p=0.1)),
    "repetition": Ask(extras=Extras(repetition_penalty=1.5)),
    "presence": Ask(extras=Extras(presence_penalty=0.8)),
    "frequency": Ask(extras=Extras(frequency_penalty=0.4)),
    "negative frequency": Ask(extras=Extras(frequency_penalty=-0.4)),
    "bias": Ask(extras=Extras(bias=((8, 2.5), (0, -1.0)), banned=(1,))),
    "everything": Ask(
        temperature=1.3,
        top_k=8,
        top_p=0.95,
        extras=Extras(
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            bias=((9, 3.0),),
            banned=(2,),
        ),
    ),
}

SOURCES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "seeds": lambda: (torch.arange(DRAWS), torch.full((DRAWS,), len(TOKENS))),
    "positions": lambda: (torch.full((DRAWS,), 1234), torch.arange(DRAWS)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ASKS)
def test_tokens_have_the_exact_distribution(name: str, source: str) -> None:
    ask = ASKS[name]
    counts, probabilities = draw(ask, *SOURCES[source]()), exact_probabilities(ask)
    impossible = [c for c, p in zip(counts, probabilities, strict=True) if p == 0.0]
    assert not any(impossible)
    assert excess(counts, probabilities) < Z


@pytest.mark.parametrize("name", ASKS)
def test_a_slightly_different_distribution_is_noticed(name: str) -> None:
    ask = ASKS[name]
    counts = draw(ask, *SOURCES["seeds"]())
    assert excess(counts, exact_probabilities(replace(ask, temperature=ask.temperature * 1.1))) > Z


def test_every_ask_changes_the_distribution() -> None:
    plain = exact_probabilities(ASKS["plain"])
    for name, ask in ASKS.items():
        differs = max(abs(a - b) for a, b in zip(exact_probabilities(ask), plain, strict=True))
        assert name == "plain" or differs > 0.01, name
