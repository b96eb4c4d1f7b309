"""Weights by a collective: a process group of one trainer rank and all ranks of an engine.

It stands beside the default group of ``torch.distributed``, of which trainer and engine each have
their own. Where the trainer's model is divided, each of its ranks has a group of its own with the
engine's, and :mod:`megatron_async.weights.parallel_layouts` joins what they send.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.processes.listening import check_port, listen_at, own_address
from megatron_async.weights.tensor_info import announced, infos_of, weights_of

TRAINER = 0
"""Rank of the trainer in the group; the engine's ranks follow."""
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""With the kind of device that each sends from."""
MAX_HEADER_BYTES = 64 << 20


class WeightGroup:
    """The members of one group call :meth:`send` and :meth:`receive` together.

    Args:
        address, port: where the trainer listens: of its own host, and at no other address.
        rank: 0 is the trainer.
        world_size: the engine's ranks and one.
        backend: ``"gloo"`` for host memory, ``"nccl"`` for GPUs.
        device: where tensors arrive, and from where they are sent.
        timeout: seconds that one waits for the others, when the group is made and later.
        name: of a group that the trainer makes by ``torch.distributed``, as SGLang's trainers do.
        trainers: of several trainer ranks, which come first, the first one listens; see
            :class:`~megatron_async.weights.sharded.group.ShardGroup`.

    Raises:
        ConfigError: an argument is wrong, or the others do not come.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        name: str | None = None,
        trainers: int = 1,
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
        if not 0 <= rank < world_size or world_size < 2:
            raise ConfigError(f"rank={rank} must be below world_size={world_size}, at least 2")
        check_port(port)
        self.device = torch.device(device)
        if self.device.type != BACKENDS[backend]:
            raise ConfigError(f"backend={backend!r} does not send tensors of {self.device}")
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("backend='nccl' needs a PyTorch that was built with NCCL")
        self.rank, self.world_size = rank, world_size
        self._timeout = timeout
        self._other = "the trainer" if rank else "an engine"
        if trainers > 1:
            self._other = "another rank"
        self._broken = ""
        limit = datetime.timedelta(seconds=timeout)
        try:
            listens = listen_at(address, port).detach() if rank == TRAINER else None
            store: dist.Store = dist.TCPStore(
                address, port, world_size, is_master=rank == TRAINER, timeout=limit,
                wait_for_workers=name is not None, master_listen_fd=listens,
            )  # fmt: skip
            if name is not None:  # torch.distributed's own prefixes
                for prefix in (name, f"{name}/", f"{self.device.type}/"):
                    store = dist.PrefixStore(prefix, store)
            own = own_address(address, port)
            self._group: Any = _process_group(backend, store, rank, world_size, limit, own)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no weight group at {address}:{port}: {str(error).splitlines()[0]}"
            ) from error

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send all weights of a state dict as the trainer, each in its dtype.

        Raises:
            CheckpointError: one cannot be sent, or a rank of the engine refuses what is announced;
                then none is sent. Or the engine has ended, or says nothing for ``timeout`` seconds;
                then the group is of no use any more.
        """
        tensors = weights_of(tensors)
        infos = infos_of(tensors)
        header = json.dumps([info.to_json() for info in infos]).encode()
        self._broadcast(torch.tensor([len(header)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if not self._agreed(True):
            raise CheckpointError("an engine refuses the announced weights; its error says why")
        for tensor in tensors.values():
            self._broadcast(tensor.detach().contiguous())

    def receive(self) -> dict[str, Tensor]:
        """Receive what the trainer sends as a rank of the engine, in memory of its own.

        Raises:
            CheckpointError: what is announced are no tensors, or too large for the memory. Or the
                trainer has ended, or says nothing for ``timeout`` seconds; then the group is of no
                use any more.
        """
        length = self._broadcast(torch.zeros(1, dtype=torch.int64))
        size = int(length)
        header = self._broadcast(torch.zeros(size, dtype=torch.uint8))
        tensors: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            if size > MAX_HEADER_BYTES:
                raise CheckpointError(f"the announced weights have a header of {size:,} bytes")
            infos = announced(json.loads(bytes(header.tolist())))
            tensors = {
                info.name: torch.empty(info.shape, dtype=info.dtype, device=self.device)
                for info in infos
            }
        except (CheckpointError, ValueError, RuntimeError) as raised:  # no memory is the last
            error = raised
        if not self._agreed(error is None):
            said = "another rank refuses them" if error is None else str(error)
            raise CheckpointError(f"the announced weights are refused: {said}") from error
        for tensor in tensors.values():
            self._broadcast(tensor)
        return tensors

    def broadcast(self, tensor: Tensor, root: int = TRAINER) -> Tensor:
        """Broadcast the trainer's tensor, or that of rank ``root``, into ``tensor`` of the others,
        on the group's device; raises CheckpointError when they are not there any more."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        is_byte = tensor.is_floating_point() and tensor.itemsize == 1  # gloo has no e4m3
        sent = tensor.view(torch.uint8) if is_byte else tensor
        with self._together() as group:
            group.broadcast([sent], options).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which are of one shape; raises as :meth:`broadcast`."""
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._together() as group:
            group.allgather([found], [tensor]).wait()
        return found

    def send_to(self, rank: int, tensor: Tensor) -> None:
        """Send a contiguous tensor to one other rank; raises as :meth:`broadcast`."""
        with self._together() as group:
            group.send([tensor], rank, 0).wait()

    def receive_from(self, rank: int, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`send_to`; raises as :meth:`broadcast`."""
        with self._together() as group:
            group.recv([tensor], rank, 0).wait()
        return tensor

    def close(self) -> None:
        """Leave the group."""
        self._group, self._broken = None, "it was closed"

    @contextlib.contextmanager
    def _together(self) -> Iterator[Any]:
        """The group for one collective. After one that has failed its members are not at the same
        place any more, so that it was the last."""
        if self._group is None:
            raise CheckpointError(f"this weight group is over: {self._broken}; make a new one")
        try:
            yield self._group
        except RuntimeError as error:
            other = self._other
            is_late = "timed out" in str(error).lower()
            said = f"said nothing for {self._timeout:g} seconds" if is_late else "has ended"
            self._group, self._broken = None, f"{other} {said}"
            raise CheckpointError(
                f"{other} {said} in the middle of a weight transfer; engines keep the weights that "
                f"they have. Make a new group ({str(error).splitlines()[0][:160]})"
            ) from error

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """:meth:`broadcast` of a tensor that may be elsewhere; returned where it was."""
        there = self.broadcast(tensor.to(self.device))
        return tensor.copy_(there) if there is not tensor and self.rank != TRAINER else tensor

    def _agreed(self, yes: bool) -> bool:
        """Whether all ranks say so."""
        vote = torch.tensor([int(yes)], dtype=torch.int32, device=self.device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        with self._together() as group:
            group.allreduce([vote], options).wait()
        return bool(int(vote))


def _process_group(
    backend: str, store: Any, rank: int, world_size: int, timeout: datetime.timedelta, address: str
) -> Any:
    """Gloo listens at ``address``, and not where the name of this host leads to."""
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = vars(gloo)["_Options"]()
        for name, value in (("devices", [gloo.create_device(address)]), ("timeout", timeout)):
            setattr(options, f"_{name}", value)
        return gloo(store, rank, world_size, options)
    nccl: Any = dist.ProcessGroupNCCL
    return nccl(store, rank, world_size, timeout)
