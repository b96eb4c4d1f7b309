"""The collectives of processes of one host on its CPU, over Unix sockets of their own.

gloo listens at a TCP port for each group and each process, as long as these live: any user of the
host may connect, take a rank's place while the ranks meet, and hold descriptors later. Here nobody
listens once a group has met, and only this user can reach the sockets before. A group of one rank
has no socket at all; it takes tensors of any device.

All ranks of a group are connected with each other. Tensors travel whole: sums are added up in the
order of ranks, so that all have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.processes.private_folder import (
    check_private_folder,
    is_of_this_user,
    listen_privately,
    private_folder,
)
from megatron_async.ranks.rendezvous.call import receive_exactly
from megatron_async.ranks.rendezvous.link import SIZE, Done, Link

BACKEND = "megatron_async"
"""The name by which torch.distributed knows it."""
SOCKET_NAME = "rank"
_OPERATIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MAX: lambda x, y: torch.maximum(x, y, out=x),
    dist.ReduceOp.MIN: lambda x, y: torch.minimum(x, y, out=x),
}


_ProcessGroup: Any = dist.ProcessGroup
"""Its methods have overloads, of which torch.distributed calls one."""


_on_collective: Callable[[str, int, int], None] | None = None


def observe(on_collective: Callable[[str, int, int], None] | None) -> None:
    """Have each collective of this process reported from now on, with its name, its start and its
    end in nanoseconds of ``time.perf_counter_ns``, in the thread that runs it; None ends it."""
    global _on_collective
    _on_collective = on_collective


_Method = TypeVar("_Method", bound=Callable[..., Done])


def _reported(name: str) -> Callable[[_Method], _Method]:
    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def run(*args: Any, **options: Any) -> Done:
            report = _on_collective
            if report is None:
                return method(*args, **options)
            start = time.perf_counter_ns()
            done: Done = method(*args, **options)
            report(name, start, time.perf_counter_ns())
            return done

        return cast(_Method, run)

    return wrap


class UnixGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of torch.distributed; see there what its methods do.

    Args:
        links: to each other rank.
    """

    def __init__(self, links: dict[int, Link], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._links = links
        self._rank = rank
        self._all = range(size)
        self._name = ""
        weakref.finalize(self, _close_all, list(links.values()))

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return BACKEND

    def size(self) -> int:
        return len(self._all)

    def _set_group_name(self, name: str) -> None:  # torch's own wants a backend below it
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @_reported("all-reduce")
    def allreduce(self, tensors: Any, opts: Any) -> Done:
        for tensor in tensors:
            self._gather_and_reduce(dict.fromkeys(self._all, tensor), tensor, opts.reduceOp)
        return Done()

    allreduce_coalesced = allreduce

    @_reported("reduce")
    def reduce(self, tensors: Any, opts: Any) -> Done:
        (tensor,) = tensors
        if opts.rootRank == self._rank:
            self._gather_and_reduce({self._rank: tensor}, tensor, opts.reduceOp)
        else:
            self._exchange({opts.rootRank: tensor}, {})
        return Done()

    @_reported("reduce-scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        for output, parts in zip(outputs, inputs, strict=True):
            self._gather_and_reduce(dict(enumerate(parts)), output, opts.reduceOp)
        return Done()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Done:
        return self.reduce_scatter([output], [tensor.chunk(self.size())], opts)

    @_reported("broadcast")
    def broadcast(self, tensors: Any, opts: Any) -> Done:
        (tensor,) = tensors
        if opts.rootRank == self._rank:
            self._exchange({rank: tensor for rank in self._all if rank != self._rank}, {})
        else:
            self._exchange({}, {opts.rootRank: tensor})
        return Done()

    @_reported("all-gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._exchange(dict.fromkeys(self._all, tensor), dict(enumerate(parts)))
        return Done()

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Done:
        return self.allgather([output.view(-1).chunk(self.size())], [tensor.reshape(-1)])

    @_reported("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        (tensor,) = inputs
        is_root = opts.rootRank == self._rank
        self._exchange({opts.rootRank: tensor}, dict(enumerate(outputs[0])) if is_root else {})
        return Done()

    @_reported("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        (tensor,) = outputs
        is_root = opts.rootRank == self._rank
        self._exchange(dict(enumerate(inputs[0])) if is_root else {}, {opts.rootRank: tensor})
        return Done()

    @_reported("all-to-all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        self._exchange(dict(enumerate(inputs)), dict(enumerate(outputs)))
        return Done()

    def barrier(self, opts: Any = None) -> Done:
        tokens = torch.zeros(self.size(), 1, dtype=torch.uint8)
        return self.allgather([tokens.unbind()], [tokens[0].clone()])

    @_reported("send")
    def send(self, tensors: Any, rank: int, tag: int = 0) -> Done:
        (tensor,) = tensors
        return self._links[rank].send(_bytes_of(tensor))

    @_reported("receive")
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Done:
        (tensor,) = tensors
        self._exchange({}, {rank: tensor})
        return Done()

    # Names of older versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _gather_and_reduce(self, sent: dict[int, Tensor], into: Tensor, operation: Any) -> None:
        parts = [torch.empty_like(into) for _ in self._all]
        self._exchange(sent, dict(enumerate(parts)))
        reduce = _operation(operation)
        for part in parts[1:]:
            reduce(parts[0], part)
        into.copy_(parts[0])

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Send a tensor to each rank of ``sent``, and receive one from each of ``received``."""
        works = [
            self._links[rank].send(_bytes_of(tensor))
            for rank, tensor in sent.items()
            if rank != self._rank
        ]
        for rank, tensor in received.items():
            if rank == self._rank:
                tensor.copy_(sent[rank])
            elif tensor.is_contiguous():
                self._links[rank].receive(_bytes_of(tensor))
            else:
                whole = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._links[rank].receive(_bytes_of(whole))
                tensor.copy_(whole)
        for work in works:
            work.wait()


def _operation(asked: Any) -> Callable[[Tensor, Tensor], Tensor]:
    for operation, function in _OPERATIONS.items():
        if asked == operation:
            return function
    raise RuntimeError(f"{asked} is not among the reductions of the backend {BACKEND}")


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory; of one that is not contiguous that of a copy."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{BACKEND} sends tensors of the CPU, and not of {tensor.device}")
    words: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(words)


def _close_all(links: list[Link]) -> None:
    for link in links:
        link.close()


# --- how the ranks of a group meet ------------------------------------------------------------


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> UnixGroup:
    """Each rank is called by those behind it; where, it says in the store."""
    seconds = timeout.total_seconds()
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        later = range(rank + 1, size)
        if later:
            folder = stack.enter_context(private_folder(SOCKET_NAME))
            server = stack.enter_context(listen_privately(f"{folder}/{SOCKET_NAME}", size))
            server.settimeout(seconds)
            store.set(f"folder of {rank}", folder)
        for earlier in range(rank):
            folder = store.get(f"folder of {earlier}").decode()
            check_private_folder(folder)
            with socket.socket(socket.AF_UNIX) as caller:
                caller.settimeout(seconds)
                caller.connect(f"{folder}/{SOCKET_NAME}")
                caller.sendall(SIZE.pack(rank))
                found[earlier] = _one_end(caller)
        while len(found) < size - 1:
            caller, _ = server.accept()
            with caller:
                caller.settimeout(seconds)
                (number,) = SIZE.unpack(receive_exactly(caller, SIZE.size))
                if not is_of_this_user(caller) or number not in later or number in found:
                    raise RuntimeError(f"rank {rank} was called by what is no rank behind it")
                found[number], theirs = socket.socketpair()
                with theirs:
                    socket.send_fds(caller, [b"."], [theirs.fileno()])
    links = {other: Link(each, f"rank {other}", seconds) for other, each in found.items()}
    return UnixGroup(links, rank, size)


def _one_end(caller: socket.socket) -> socket.socket:
    """Receive one end of a pair without a name, which the process that was called hands over."""
    said, descriptors, _, _ = socket.recv_fds(caller, 1, 1)
    if not said or len(descriptors) != 1:
        raise RuntimeError("a rank has hung up while the ranks met")
    connection = socket.socket(fileno=descriptors[0])
    connection.set_inheritable(False)
    return connection


dist.Backend.register_backend(BACKEND, _meet, devices=["cpu", "cuda"])
