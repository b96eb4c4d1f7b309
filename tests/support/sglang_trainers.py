"""What SGLang's trainers do on their side: buckets of tensors in shared memory, and a group of
``torch.distributed`` beside their own."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


@dataclasses.dataclass
class FlattenedTensorMetadata:
    """Where a tensor is in its bucket, in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def serialized(value: Any) -> str:
    """``value`` with handles of its tensors, which must outlive it, in base64."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    stream = io.BytesIO()
    ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return base64.b64encode(stream.getvalue()).decode()


def bucket(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """All tensors as one of bytes, and where each is."""
    parts, places, at = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.detach().flatten().view(torch.uint8)
        end = at + len(part)
        places.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, end, tensor.numel())
        )
        parts.append(part)
        at = end
    return {"flattened_tensor": torch.cat(parts), "metadata": places}


class TrainerGroup:
    """The trainer's rank of a named group, as slime and AReaL make it."""

    def __init__(self, name: str, port: int, timeout: float) -> None:
        limit = datetime.timedelta(seconds=timeout)
        init = f"tcp://127.0.0.1:{port}"
        store, rank, world_size = next(dist.rendezvous(init, 0, 2, timeout=limit))  # type: ignore[no-untyped-call]
        store.set_timeout(limit)
        prefixed = dist.PrefixStore(name, store)
        make: Any = c10d._new_process_group_helper
        self.group, _ = make(
            world_size, rank, [], dist.Backend("gloo"), prefixed, group_name=name, timeout=limit
        )
        c10d._world.pg_group_ranks[self.group] = {each: each for each in range(world_size)}

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Send them one by one."""
        for tensor in tensors:
            dist.broadcast(tensor.detach().contiguous(), 0, group=self.group)

    def close(self) -> None:
        """Leave it."""
        dist.destroy_process_group(self.group)
