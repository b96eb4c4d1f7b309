"""Messages between ranks through each other's memory; the ranks here are of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.ranks import mailbox
from megatron_async.kernels.ranks.mailbox import Mailbox
from tests.support.cuda_kernels import device, on_both

__all__ = ["device"]

SENDER, SLOTS, CAPACITY = 2, 4, 64


@pytest.fixture
def ranks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Mailbox]:
    """Two that take, and one that posts to both, over small rings."""
    monkeypatch.setattr(mailbox, "SLOTS", SLOTS)
    monkeypatch.setattr(mailbox, "CAPACITY", CAPACITY)
    memory = tuple(
        torch.zeros(SLOTS * CAPACITY, dtype=torch.int64, device=device) for _ in range(3)
    )
    return [Mailbox(rank, memory, (0, 1) if rank == SENDER else ()) for rank in range(3)]


def message(words: int, seed: int, device: torch.device) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32).to(device)


def taken(ranks: list[Mailbox], rank: int, like: Tensor) -> Tensor:
    return ranks[rank].take_(torch.zeros_like(like))


BOTH = {"gpu": [()], "small": [()]}


@on_both(**BOTH)
def test_each_gets_all_messages_in_order(device: torch.device, ranks: list[Mailbox]) -> None:
    """Messages of other lengths, more than a ring has places for, some still to be taken."""
    sizes = [1, CAPACITY, 2, 33, 7, 64, 5, 12, 1, 40]
    sent = [message(words, seed, device) for seed, words in enumerate(sizes)]
    for number, each in enumerate(sent):
        ranks[SENDER].post(each)
        behind = number - SLOTS + 1
        if behind >= 0:
            assert taken(ranks, 0, sent[behind]).equal(sent[behind])
        assert taken(ranks, 1, each).equal(each)
    for each in sent[-SLOTS + 1 :]:
        assert taken(ranks, 0, each).equal(each)


@on_both(**BOTH)
def test_numbers_go_on_past_the_largest(device: torch.device, ranks: list[Mailbox]) -> None:
    """0 is the number of words that nobody has sent, and places go on in turns."""
    for each in ranks:
        each._done.fill_(-3)
    for seed in range(8):
        each = message(9, seed, device)
        ranks[SENDER].post(each)
        assert taken(ranks, 0, each).equal(each) and taken(ranks, 1, each).equal(each)
    assert int(ranks[0]._done) == SLOTS + 8 - 3


@on_both(**BOTH)
def test_what_it_does_not_hold(device: torch.device, ranks: list[Mailbox]) -> None:
    assert ranks[0].holds(message(CAPACITY, 0, device))
    assert not ranks[0].holds(message(CAPACITY + 1, 0, device))
    ranks[SENDER].post(message(0, 0, device))
    assert int(ranks[SENDER]._done) == 0, "nobody waits for nothing"
