"""Collectives over Unix sockets: what they compute, and who may take part."""

from __future__ import annotations

import datetime
import functools
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_async.ranks.rendezvous import unix_group
from megatron_async.ranks.rendezvous.link import Link
from megatron_async.ranks.rendezvous.unix_group import UnixGroup
from tests.support.patience import PATIENCE_SECONDS

RANKS = 3
FAR_MORE_THAN_A_SOCKET_TAKES = 1 << 20


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the ranks meet: a short path that nobody else uses."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def on_all(
    ranks: int, work: Callable[[UnixGroup, int], Any], store: dist.Store | None = None
) -> list[Any]:
    """Ranks as threads, which meet; one that fails hangs up."""
    store = dist.HashStore() if store is None else store
    limit = datetime.timedelta(seconds=PATIENCE_SECONDS)

    def run(rank: int) -> Any:
        group = unix_group._meet(store, rank, ranks, limit)
        try:
            return work(group, rank)
        except BaseException:
            unix_group._close_all(list(group._links.values()))
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def options(kind: Any, **values: Any) -> Any:
    found = kind()
    for name, value in values.items():
        setattr(found, name, value)
    return found


REDUCTIONS = {
    dist.ReduceOp.SUM: lambda parts: functools.reduce(torch.add, parts),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.PRODUCT: lambda parts: functools.reduce(torch.mul, parts),
}


@pytest.mark.parametrize("ranks", [1, 2, RANKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_have_the_same_bits_on_all_ranks(
    ranks: int, dtype: torch.dtype, temporary: Path
) -> None:
    parts = [(torch.randn(4, 5) * 9).to(dtype) for _ in range(ranks)]

    def work(group: UnixGroup, rank: int) -> list[torch.Tensor]:
        found = []
        for operation in REDUCTIONS:
            # A view that is not contiguous is reduced too.
            tensor = parts[rank].clone().T.contiguous().T
            group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=operation)).wait()
            found.append(tensor)
        for shape in ((), (0, 3)):
            group.allreduce([torch.ones(shape)], dist.AllreduceOptions())
        return found

    for found in on_all(ranks, work):
        for tensor, expected in zip(found, REDUCTIONS.values(), strict=True):
            assert torch.equal(tensor, expected(parts))


def test_what_one_rank_has_goes_where_it_is_to_go(temporary: Path) -> None:
    def work(group: UnixGroup, rank: int) -> None:
        def of(*ranks: int) -> list[torch.Tensor]:
            return [torch.full((2,), float(each)) for each in ranks]

        (own,) = of(rank)
        everybody = of(*range(RANKS))
        empty = [torch.empty(2) for _ in range(RANKS)]
        group.broadcast(got := of(rank), options(dist.BroadcastOptions, rootRank=1))
        assert torch.equal(got[0], everybody[1])
        group.allgather([empty], [own])
        assert all(map(torch.equal, empty, everybody))
        whole = torch.empty(2 * RANKS)
        group.all_gather_single(whole, own)
        assert torch.equal(whole, torch.cat(everybody))
        at_2 = options(dist.GatherOptions, rootRank=2)
        group.gather([got] if rank == 2 and (got := of(9, 9, 9)) else [], [own], at_2)
        assert rank != 2 or all(map(torch.equal, got, everybody))
        from_0 = options(dist.ScatterOptions, rootRank=0)
        group.scatter(got := of(9), [everybody] if rank == 0 else [], from_0)
        assert torch.equal(got[0], own)
        group.alltoall(got := of(9, 9, 9), of(*(10 * rank + each for each in range(RANKS))))
        assert all(map(torch.equal, got, of(*(10 * each + rank for each in range(RANKS)))))
        group.reduce(got := of(rank), options(dist.ReduceOptions, rootRank=0))
        assert torch.equal(got[0], of(3 if rank == 0 else rank)[0])
        group.reduce_scatter_single(own, whole, dist.ReduceScatterOptions())
        assert torch.equal(own, of(3 * rank)[0])
        group.barrier()

    on_all(RANKS, work)


def test_sends_wait_for_no_receive_and_keep_their_order(temporary: Path) -> None:
    """Both send more than fits, and only then receive."""
    tensors = [torch.randn(FAR_MORE_THAN_A_SOCKET_TAKES) for _ in range(3)]

    def work(group: UnixGroup, rank: int) -> None:
        works = [group.send([each + rank], 1 - rank) for each in tensors]
        if rank == 0:
            assert not works[-1].is_completed()
        meet.wait(PATIENCE_SECONDS)
        for each in tensors:
            group.recv([found := torch.empty_like(each)], 1 - rank)
            assert torch.equal(found, each + (1 - rank))
        assert all(each.wait() for each in works)
        group.allreduce(
            [total := torch.ones(FAR_MORE_THAN_A_SOCKET_TAKES)], dist.AllreduceOptions()
        )
        assert (total == 2).all()

    meet = threading.Barrier(2)
    on_all(2, work)


def test_nobody_listens_once_a_group_has_met(temporary: Path) -> None:
    def listening() -> list[Any]:
        found = psutil.Process().net_connections(kind="all")
        return [each for each in found if each.status == psutil.CONN_LISTEN or each.laddr]

    before = listening()
    groups = on_all(RANKS, lambda group, rank: group)
    assert list(temporary.iterdir()) == [] and listening() == before
    assert groups[0].size() == RANKS


def test_a_rank_that_has_gone_is_an_error_for_who_waits(temporary: Path) -> None:
    def work(group: UnixGroup, rank: int) -> str:
        if rank == 0:
            unix_group._close_all(list(group._links.values()))
            return ""
        with pytest.raises(RuntimeError, match="rank 0") as error:
            while True:
                group.broadcast([torch.empty(4)], options(dist.BroadcastOptions, rootRank=0))
        return str(error.value)

    assert on_all(2, work)[1] == "rank 0 has closed the connection"


def test_another_size_than_is_expected_is_an_error(temporary: Path) -> None:
    def work(group: UnixGroup, rank: int) -> None:
        if rank == 0:
            group.send([torch.zeros(FAR_MORE_THAN_A_SOCKET_TAKES)], 1)
            return
        with pytest.raises(RuntimeError, match="rank 0 sends 4194304 bytes where 12 are expected"):
            group.recv([torch.empty(3)], 0)

    on_all(2, work)


def test_silence_has_an_end() -> None:
    own, other = socket.socketpair()
    link = Link(own, "rank 1", 0.01)
    with pytest.raises(RuntimeError, match=r"rank 1 has timed out: nothing for 0\.01 seconds"):
        link.receive(memoryview(bytearray(4)))
    work = link.send(memoryview(bytes(FAR_MORE_THAN_A_SOCKET_TAKES)))
    behind = link.send(memoryview(b"behind"))
    for each in (work, behind):
        with pytest.raises(RuntimeError, match="timed out"):
            each.wait()
    link.close()
    other.close()


def test_a_folder_that_others_reach_is_not_called(temporary: Path) -> None:
    os.chmod(temporary, 0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{temporary}/{unix_group.SOCKET_NAME}")
        server.listen()
        store = dist.HashStore()
        store.set("folder of 0", str(temporary))
        with pytest.raises(Exception, match="no directory that this user alone may enter"):
            unix_group._meet(store, 1, 2, datetime.timedelta(seconds=1))


def test_what_is_not_supported_says_so() -> None:
    (group,) = on_all(1, lambda group, rank: group)
    with pytest.raises(RuntimeError, match="is not among the reductions of the backend"):
        group.allreduce(
            [torch.ones(1, dtype=torch.int64)],
            options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.BXOR),
        )
    with pytest.raises(RuntimeError, match="sends tensors of the CPU, and not of meta"):
        unix_group._bytes_of(torch.empty(3, device="meta"))
