"""Weights that another process of the same host reads where they lie: GPU memory by CUDA IPC, and
host memory as a file in memory.

Handles are plain data, so that they can go over any connection: no pickle is needed.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from megatron_async.errors import CheckpointError
from megatron_async.processes.private_folder import let_go, make_private_file
from megatron_async.weights.tensor_info import TensorInfo, announced, infos_of, weights_of

ALIGNMENT = 64
"""Bytes to which tensors are aligned in host memory."""
_IN_MEMORY = Path("/dev/shm")

# What ``reduce_tensor`` says of a CUDA tensor behind its class, with "device" as a UUID.
_CUDA_FIELDS = (
    "size", "stride", "offset", "storage", "dtype", "device", "handle", "storage_bytes",
    "storage_offset", "requires_grad", "counter", "counter_offset", "event", "event_sync",
)  # fmt: skip
_CUDA_BYTES = ("handle", "counter", "event")


class SharedWeights:
    """The trainer's side. CUDA tensors are read where they are: they must stay as they are until
    the engine has taken them. Tensors of the CPU are copied into a file in memory, which is made
    once and used again, and goes away with this object, or with the process.

    Args:
        tensors: by megatron-core's parameter names; what :meth:`export` shows.

    Raises:
        CheckpointError: there are none, they are on several kinds of devices, or one has a dtype
            that is not sent.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = weights_of(tensors)
        self._infos = infos_of(self._tensors)
        kinds = {tensor.device.type for tensor in self._tensors.values()}
        if len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
            raise CheckpointError(
                f"shared weights are on {', '.join(sorted(kinds)) or 'no device'}; give tensors "
                "of the CPU, or of CUDA devices"
            )
        self._path: Path | None = None
        self._views: list[Tensor] = []
        self._end: Callable[[], object] | None = None
        if kinds == {"cpu"}:
            self._offsets, size = _offsets_of(self._infos)
            self._path = _file_in_memory()
            self._end = weakref.finalize(self, _remove, self._path, os.getpid())
            whole = _mapped(self._path, size)
            self._views = _views(whole, self._infos, self._offsets)

    def export(self) -> dict[str, Any]:
        """Handles of the tensors as they are now, in JSON's types, for :func:`open_weights` to be
        called once with. Waits for the device."""
        infos = [info.to_json() for info in self._infos]
        if self._path is None:
            for device in {tensor.device for tensor in self._tensors.values()}:
                torch.cuda.synchronize(device)
            cuda = [_cuda_handle(tensor) for tensor in self._tensors.values()]
            return {"kind": "cuda", "tensors": infos, "handles": cuda}
        for view, tensor in zip(self._views, self._tensors.values(), strict=True):
            view.copy_(tensor)
        return {"kind": "cpu", "tensors": infos, "path": str(self._path)}

    def close(self) -> None:
        """The file in memory goes away with its last reader."""
        if self._end is not None:
            self._end()
        self._views = []

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_weights(handles: Mapping[str, Any]) -> dict[str, Tensor]:
    """The engine's side: tensors over the trainer's memory, to be read and let go.

    Raises:
        CheckpointError: these are no handles, or what they name is not there.
    """
    try:
        infos = announced(handles["tensors"])
        if handles["kind"] == "cpu":
            tensors = _of_file(Path(handles["path"]), infos)
        elif handles["kind"] == "cuda":
            pairs = zip(infos, handles["handles"], strict=True)
            tensors = [_of_cuda_handle(info, each) for info, each in pairs]
        else:
            raise CheckpointError(f"handles of the kind {handles['kind']!r}; give cpu or cuda")
    except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"shared weights cannot be opened: {said[:300]}") from error
    return {info.name: tensor for info, tensor in zip(infos, tensors, strict=True)}


# --- host memory ------------------------------------------------------------------------------


def _offsets_of(infos: Sequence[TensorInfo]) -> tuple[list[int], int]:
    """Where each tensor begins, and bytes in all."""
    offsets, end = [], 0
    for info in infos:
        offsets.append(end)
        end += -(-info.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _file_in_memory() -> Path:
    """A new file that only this user can read."""
    directory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir()
    return Path(make_private_file("weights", str(directory)))


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked from it only ends
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        let_go(str(path))


def _mapped(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _views(whole: Tensor, infos: Sequence[TensorInfo], offsets: Sequence[int]) -> list[Tensor]:
    return [
        whole[offset : offset + info.nbytes].view(info.dtype).view(info.shape)
        for info, offset in zip(infos, offsets, strict=True)
    ]


def _of_file(path: Path, infos: Sequence[TensorInfo]) -> list[Tensor]:
    offsets, size = _offsets_of(infos)
    if not path.is_file() or path.stat().st_size != size:  # torch would make it, or extend it
        raise CheckpointError(f"{path} does not hold the {size:,} bytes of shared weights")
    return _views(_mapped(path, size), infos, offsets)


# --- GPU memory -------------------------------------------------------------------------------


def _cuda_handle(tensor: Tensor) -> dict[str, Any]:
    _, (_, *values) = reduce_tensor(tensor)
    fields = dict(zip(_CUDA_FIELDS, values, strict=True))
    device = torch.cuda.get_device_properties(tensor.device)
    for name in ("storage", "dtype", "requires_grad"):
        del fields[name]
    for name in _CUDA_BYTES:
        fields[name] = base64.b64encode(fields[name]).decode()
    sizes = {"size": list(fields["size"]), "stride": list(fields["stride"])}
    return {**fields, **sizes, "device": str(device.uuid)}


def _of_cuda_handle(info: TensorInfo, handle: Mapping[str, Any]) -> Tensor:
    fields = dict(handle)
    if tuple(fields["size"]) != info.shape:
        raise CheckpointError(f"the handle of {info.name} is of another shape")
    for name in _CUDA_BYTES:
        fields[name] = base64.b64decode(fields[name])
    fields |= {
        "size": torch.Size(fields["size"]),
        "stride": tuple(fields["stride"]),
        "storage": TypedStorage,
        "dtype": info.dtype,
        "device": _device_of(fields["device"]),
        "requires_grad": False,
    }
    rebuilt: Tensor = rebuild_cuda_tensor(torch.Tensor, *(fields[name] for name in _CUDA_FIELDS))
    return rebuilt


def _device_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise CheckpointError(f"the shared weights are on the GPU {uuid}, which is not visible here")
