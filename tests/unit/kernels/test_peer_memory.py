"""Which sums over ranks take the kernel over each other's memory: the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.kernels.gemm.tile_config import RMS_NORM
from megatron_async.kernels.ranks import peer_memory, peer_sum
from megatron_async.kernels.ranks.peer_sum import CTAS, PeerWords, word_count
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import HALF, Norm, Workspace

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize("ranks", (2, 8))
def test_there_is_room_for_decode_steps(ranks: int) -> None:
    words = words_of(ranks, peer_memory.MOST_ELEMENTS)
    assert peer_sum.why_not(8192, 64, words) is None
    assert word_count(ranks, words.capacity) * 8 <= 32 << 20, "bytes on each rank"


def test_more_rows_than_fit_are_refused() -> None:
    assert "33 rows of 64 are more" in str(peer_sum.why_not(64, 33, words_of(2, 2048)))
    assert "not a multiple of 64" in str(peer_sum.why_not(96, 1, words_of(2, 2048)))
    with pytest.raises(ValueError, match="capacity 2000 must be a multiple of 256"):
        word_count(2, 2000)


def words_of(ranks: int, capacity: int) -> PeerWords:
    memory = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(ranks))
    return PeerWords(0, memory, torch.zeros(CTAS, dtype=torch.int32), capacity)


class Group:
    """What all ranks say, of which this process is the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: list[tuple[Any, ...]]) -> None:
        self.others, self.asked, self.met = others, 0, 0
        self.fails: str | None = None
        self.group_name = "1"
        monkeypatch.setattr(peer_memory, "_opened", {})
        monkeypatch.setattr(peer_sum, "runs_on", lambda device: None)
        monkeypatch.setattr(peer_memory.platform, "node", lambda: "here")
        monkeypatch.setattr(peer_memory, "_meet", self.meet)
        monkeypatch.setattr(peer_memory.dist, "get_world_size", lambda group: 1 + len(others))
        monkeypatch.setattr(peer_memory.dist, "all_gather_object", self.gather)

    def gather(self, said: list[Any], own: tuple[Any, ...], group: Any) -> None:
        self.asked += 1
        said[:] = [own, *((other[0], *other[1 : len(own)]) for other in self.others)]

    def meet(self, *_: Any) -> str:
        self.met += 1
        if self.fails is not None:
            raise RuntimeError(self.fails)
        return "words"

    def open(self) -> Any:
        return peer_memory.open_words(self, GPU)


def test_ranks_of_one_host_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, [(None, "here")])
    assert group.open() == "words"
    assert (group.met, group.asked) == (1, 2)
    assert peer_memory._opened == {"1": "words"}, "not freed while a kernel may wait"


@pytest.mark.parametrize(
    ("other", "fails", "met"),
    [
        ((None, "there"), None, 0),
        (("the GPU is older", "here"), None, 0),
        ((None, "here"), "no access to a peer\nat some line", 1),
    ],
)
def test_one_reason_is_all_ranks_reason(
    monkeypatch: pytest.MonkeyPatch, other: tuple[Any, ...], fails: str | None, met: int
) -> None:
    group = Group(monkeypatch, [other])
    group.fails = fails
    assert group.open() is None
    assert group.met == met


def test_nobody_is_asked_where_there_is_nothing_to_agree_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch, [(None, "here")])
    assert peer_memory.open_words(group, CPU) is None
    assert group.asked == 0


def test_a_group_by_the_name_of_an_earlier_one_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would look for the ranks of the earlier one."""
    group = Group(monkeypatch, [(None, "here")])
    assert group.open() == "words"
    assert group.open() is None
    group.group_name = "2"
    assert group.open() == "words" and group.met == 2


def test_nine_ranks_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, [(None, "here")] * 8)
    assert group.open() is None
    assert peer_memory.why_not(9, GPU) == "9 ranks are not from 2 to 8"


@pytest.fixture
def summed() -> list[int]:
    """Rows that an all-reduce was called with."""
    return []


@pytest.fixture
def all_reduce(summed: list[int]) -> Callable[[torch.Tensor], None]:
    pytest.importorskip("triton", reason="the sum is added to the stream by a kernel of Triton's")

    def reduce(x: torch.Tensor) -> None:
        summed.append(len(x))
        x *= 2

    return reduce


def test_steps_of_many_rows_are_left_to_the_all_reduce(
    monkeypatch: pytest.MonkeyPatch,
    all_reduce: Callable[[torch.Tensor], None],
    summed: list[int],
) -> None:
    launched: list[tuple[int, int]] = []

    def sum_up(kernel: Any, partial: Any, hidden: Any, rows: int, **_: Any) -> None:
        launched.append((len(partial), rows))

    monkeypatch.setattr(peer_sum.PeerSum, "__call__", sum_up)
    sums = RankSums(all_reduce, words_of(2, 4 * 256), 256, CPU)
    reader = Norm(RMS_NORM, torch.ones(256).bfloat16(), None, 1e-5)
    workspace = Workspace(256, CPU)
    for rows, tiles in ((3, 1), (5, 1)):
        residual = workspace.residual(rows)
        residual.hidden.fill_(1)
        partial = sums.partial(residual)
        partial.fill_(1)
        statistics = sums.add(partial, None, residual, reader, HALF)
        assert statistics is not None and statistics.shape == (rows, tiles, 2)
        assert (residual.hidden == (1 if rows == 3 else 3)).all()
    assert (launched, summed) == ([(3, 4)], [5])
    assert [source for source, _ in sums.work(4, reader)] == ["peer_sum"]
    assert not list(sums.work(8, reader))


def test_without_words_there_is_the_all_reduce(
    all_reduce: Callable[[torch.Tensor], None], summed: list[int]
) -> None:
    sums = RankSums(all_reduce, None, 256, CPU)
    residual = Workspace(256, CPU).residual(1)
    residual.hidden.zero_()
    assert sums.add(torch.ones(1, 256).bfloat16(), None, residual, None, HALF) is None
    assert summed == [1] and (residual.hidden == 2).all()
