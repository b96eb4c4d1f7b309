"""Sampling over ranks that have some columns each is sampling of the whole row, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from megatron_async.sampling.sharded import sample_tokens_sharded

WIDTH, ROWS = 60, 12


class Together:
    """Collectives of threads."""

    def __init__(self, ranks: int) -> None:
        self.given: list[Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks)


class Exchange:
    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def _combine(self, x: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        self._together.given[self._rank] = x.clone()
        self._together.barrier.wait()
        found = combine(torch.stack([t for t in self._together.given if t is not None]))
        self._together.barrier.wait()
        return x.copy_(found)

    def sum_(self, x: Tensor) -> Tensor:
        return self._combine(x, lambda each: each.sum(0))

    def max_(self, x: Tensor) -> Tensor:
        return self._combine(x, lambda each: each.amax(0))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("ranks", "padding"), ((2, 0), (3, 7), (4, WIDTH + 3)))
def test_each_rank_gets_the_token_of_the_whole_row(
    ranks: int, padding: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(ranks)
    vocab_size = ranks * WIDTH - padding
    for _ in range(4):
        # Few values, so that many scores and thresholds are equal.
        logits = (torch.randn(ROWS, ranks * WIDTH) * 3).round(decimals=1).to(dtype)
        logits[0] = -torch.inf
        logits[1, 5] = torch.nan
        logits[2, ::2] = -torch.inf
        logits[3, vocab_size:] = torch.nan  # padding counts for nothing
        parameters = (
            torch.tensor([0.0, 1.0, 0.5, 2.0] * 3),
            torch.tensor([0, 0, 5, 50, 1, vocab_size, 3, 7, 0, 0, 2, 9], dtype=torch.int32),
            torch.tensor([0.0, 0.9, 0.3, 0.0, 0.5, 0.99, 1.0, 0.1, 0.0, 0.7, 0.0, 0.95]),
            torch.randint(-(2**63), 2**63 - 1, (ROWS,)),
            torch.randint(0, 1000, (ROWS,)),
        )
        expected = sample_tokens_reference(logits, SampleInputs(*parameters), vocab_size=vocab_size)
        assert expected[1] == -1 and expected[0] == 0
        found = sample_together(ranks, logits, parameters, vocab_size)
        assert all(torch.equal(tokens, expected) for tokens in found)


def sample_together(
    ranks: int, logits: Tensor, parameters: tuple[Tensor, ...], vocab_size: int
) -> list[Tensor]:
    """What each of so many ranks samples, a thread each."""
    together, found = Together(ranks), [torch.empty(0)] * ranks

    def sample(rank: int) -> None:
        first = rank * WIDTH
        found[rank] = sample_tokens_sharded(
            logits[:, first : first + WIDTH],
            SampleInputs(*parameters),
            first_id=first,
            vocab_size=vocab_size,
            exchange=Exchange(together, rank),
        )

    threads = [threading.Thread(target=sample, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
