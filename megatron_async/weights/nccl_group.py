"""A group over NCCL as vLLM's ``PyNcclCommunicator`` opens it, for trainers that speak to vLLM.

The trainer, rank 0, serves a ``TCPStore`` and puts NCCL's unique id there, as a pickle, of which
the 128 bytes are taken without loading it. Then all ranks sum one number, to warm up.

It has not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import datetime
import pickletools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.processes.listening import check_port

ID_BYTES = 128
ID_KEY = "broadcast_from/0/0"
_INT8, _FLOAT32, _SUM = 0, 7, 0
"""Values of NCCL's enumerations."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


def unique_id_of(pickled: bytes) -> bytes:
    """NCCL's unique id in a pickle of a structure that holds it; nothing is loaded.

    Raises:
        ConfigError: there is none.
    """
    try:
        for _, value, _ in pickletools.genops(pickled):
            if isinstance(value, bytes | bytearray) and len(value) == ID_BYTES:
                return bytes(value)
    except Exception as error:  # a corrupt pickle can raise anything
        raise ConfigError(f"the trainer's unique id is no pickle: {error}") from error
    raise ConfigError(f"the trainer's unique id has no {ID_BYTES} bytes")


class NcclGroup:
    """An engine's rank in a group with a trainer.

    Args:
        address, port: where the trainer's store is.
        rank: from 1 on.
        device: a CUDA device.
        timeout: seconds to wait for the trainer.

    Raises:
        ConfigError: the trainer does not come, or NCCL is missing or fails.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: float = 300.0,
    ) -> None:
        if device.type != "cuda":
            raise ConfigError(f"backend='nccl' does not send tensors of {device}")
        check_port(port)
        self.device = device
        try:
            self._nccl = ctypes.CDLL("libnccl.so.2")
            self._store = dist.TCPStore(
                address, port, world_size, is_master=False, use_libuv=False,
                timeout=datetime.timedelta(seconds=timeout),
            )  # fmt: skip
            unique_id = unique_id_of(self._store.get(ID_KEY))
        except (OSError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise ConfigError(f"no weight group at {address}:{port}: {said}") from error
        self._communicator = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._call(
                "ncclCommInitRank", ctypes.byref(self._communicator), ctypes.c_int(world_size),
                _UniqueId.from_buffer_copy(unique_id), ctypes.c_int(rank),
            )  # fmt: skip
            warm_up = torch.zeros(1, device=device)
            torch.cuda.synchronize(device)
            self._call(
                "ncclAllReduce", *self._in_place(warm_up), ctypes.c_size_t(1),
                ctypes.c_int(_FLOAT32), ctypes.c_int(_SUM), *self._where(),
            )  # fmt: skip
            self._stream.synchronize()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The trainer's, into ``tensor``, which is contiguous and on the group's device."""
        torch.cuda.current_stream(self.device).synchronize()
        with torch.cuda.device(self.device):
            self._call(
                "ncclBroadcast", *self._in_place(tensor), ctypes.c_size_t(tensor.nbytes),
                ctypes.c_int(_INT8), ctypes.c_int(0), *self._where(),
            )  # fmt: skip
            self._stream.synchronize()
        return tensor

    def close(self) -> None:
        """Leave the group."""
        if self._communicator:
            self._call("ncclCommAbort", self._communicator)
            self._communicator = ctypes.c_void_p()

    def _in_place(self, tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(tensor.data_ptr())

    def _where(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._communicator, ctypes.c_void_p(self._stream.cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nccl, name)(*arguments)
        if status:
            raise ConfigError(f"{name} failed with NCCL's error {status}")
