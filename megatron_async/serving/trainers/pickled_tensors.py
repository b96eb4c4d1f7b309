"""Tensors as SGLang's clients serialize them: handles of shared memory in a pickle, which is read
and never run."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from megatron_async.checkpoint.reading.pickle_reader import (
    Global,
    PickleReader,
    Record,
)
from megatron_async.errors import CheckpointError
from megatron_async.weights.tensor_info import DTYPES, TensorInfo

FLATTENED = "flattened_bucket"
"""The format of one tensor of bytes, with the places of all others in it."""
_REDUCTIONS = "torch.multiprocessing.reductions."
_TENSOR, _CUDA = f"{_REDUCTIONS}rebuild_tensor", f"{_REDUCTIONS}rebuild_cuda_tensor"
_STORAGE, _FILE = f"{_REDUCTIONS}rebuild_typed_storage", f"{_REDUCTIONS}rebuild_storage_filename"
_CUDA_ARGUMENTS, _DEVICE = 15, 6
_ALLOWED = re.compile(
    r"torch\.(Tensor|Size|nn\.parameter\.Parameter|storage\.(Untyped|Typed)Storage|[a-z]+\d*"
    r"|float8_[a-z0-9]+)"
    r"|torch\.multiprocessing\.reductions\.rebuild_[a-z_]+"
    r"|[\w.]+\.(_rebuild_cuda_tensor_modified|FlattenedTensorMetadata|LocalSerializedTensor)"
)
"""What a pickle may name: it is looked up in this module alone."""
_SHARED = re.compile(r"/torch_[\w.-]+")
_IN_MEMORY = Path("/dev/shm")
_HEADER = 64
"""Bytes in front of a storage in torch's files in memory."""

_UNREADABLE = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,  # of a torch without CUDA
)


def read_tensors(serialized: str, load_format: str | None, most_bytes: int) -> dict[str, Tensor]:
    """Tensors by name, in memory of their own.

    Args:
        serialized: one rank's, in base64.
        load_format: :data:`FLATTENED`, or None for a list of names and tensors.
        most_bytes: that all of them may take; views of one byte may say that they are gigabytes.

    Raises:
        CheckpointError: they are none, take more, or their memory cannot be reached.
    """
    room = Room(most_bytes)
    try:
        found = _load(base64.b64decode(serialized, validate=True))
        if load_format == FLATTENED:
            return _unflattened(found, room)
        return {_text(name): room.copy(_tensor_of(value)) for name, value in _pairs(found)}
    except _UNREADABLE as error:
        said = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(f"the serialized tensors cannot be read: {said}") from error


class Room:
    """How many bytes copies may still take."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy; raises ValueError if there is no room for it."""
        self._left -= tensor.nbytes
        if self._left < 0:
            raise ValueError("they take more bytes than the model; send its parameters alone, once")
        return tensor.clone()


def _load(data: bytes) -> Any:
    return PickleReader(data, lambda name: _ALLOWED.fullmatch(name) is not None).load()


def _pairs(found: Any) -> list[tuple[Any, Any]]:
    if isinstance(found, dict):
        return list(found.items())
    if not isinstance(found, list) or not all(type(e) is tuple and len(e) == 2 for e in found):
        raise ValueError("they are no list of names and tensors")
    return found


def _unflattened(found: Any, room: Room) -> dict[str, Tensor]:
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), list):
        raise ValueError("they are no flattened bucket")
    if not found["metadata"]:
        return {}
    flat = room.copy(_tensor_of(found.get("flattened_tensor"))).reshape(-1)
    tensors = {}
    for each in found["metadata"]:
        if not isinstance(each, Record):
            raise ValueError("a bucket's metadata are no records")
        name, dtype = each.field("name", str), _dtype_of(each.field("dtype", Global))
        shape = _size_of(each.field("shape", Record, tuple, list))
        start, end = each.field("start_idx", int), each.field("end_idx", int)
        if not 0 <= start <= end <= len(flat):
            raise ValueError(f"{name[:200]} is not in its bucket")
        part = flat[start:end]
        if part.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name[:200]} has another size in its bucket")
        if part.storage_offset() * part.itemsize % dtype.itemsize:
            part = room.copy(part)
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def _tensor_of(value: Any) -> Tensor:
    """A view of the memory of another process."""
    if isinstance(value, Record) and value.name.endswith(".LocalSerializedTensor"):
        values = value.field("values", list)
        if len(values) != 1:
            raise ValueError("a tensor is divided among ranks; send whole ones")
        inner = values[0]
        return _tensor_of(_load(inner if isinstance(inner, bytes) else base64.b64decode(inner)))
    if isinstance(value, Record) and value.name == _TENSOR and len(value.args) == 3:
        return _of_file(*value.args[1:])
    is_cuda = isinstance(value, Record) and value.name.endswith(
        (_CUDA, "._rebuild_cuda_tensor_modified")
    )
    if is_cuda and len(value.args) == _CUDA_ARGUMENTS:
        return _of_cuda(value.args)
    raise ValueError("a tensor is in no memory that another process may read; share it")


def _of_file(storage: Any, metadata: Any) -> Tensor:
    """A tensor of the CPU that its process shares as a file in memory."""
    if not isinstance(storage, Record) or storage.name != _STORAGE:
        raise ValueError("a tensor has no storage")
    untyped, _ = storage.args
    if not isinstance(untyped, Record) or untyped.name != _FILE:
        raise ValueError("a tensor of the CPU is shared by a file descriptor; share it by file")
    handle, size = untyped.args[2], untyped.args[3]
    name = handle.decode("ascii", "replace") if isinstance(handle, bytes) else ""
    path = _IN_MEMORY / name.lstrip("/")
    if not _SHARED.fullmatch(name) or type(size) is not int or path.is_symlink():
        raise ValueError("a tensor names no memory that is shared")
    end = _HEADER + size
    if not path.is_file() or path.stat().st_size < end:  # torch would make it, or extend it
        raise ValueError(f"{path} does not hold {size:,} bytes")
    offset, shape, stride, _ = metadata
    dtype = _dtype_of(storage.args[1])
    whole = torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8)[_HEADER:]
    if size % dtype.itemsize:
        raise ValueError("a storage has a part of an element")
    elements = whole.view(dtype)
    shape, start = _size_of(shape), elements.storage_offset() + offset
    if offset < 0:
        raise ValueError("a tensor begins in front of its storage")
    return elements.as_strided(shape, tuple(stride), start)


def _of_cuda(arguments: Sequence[Any]) -> Tensor:
    """A tensor of a GPU, by CUDA IPC. The device is a number or a UUID."""
    given = list(arguments)
    given[0], given[1], given[4] = Tensor, torch.Size(_size_of(given[1])), TypedStorage
    given[5], given[10] = _dtype_of(given[5]), False
    if isinstance(given[_DEVICE], str):
        uuids = [
            str(torch.cuda.get_device_properties(index).uuid)
            for index in range(torch.cuda.device_count())
        ]
        if given[_DEVICE] not in uuids:
            raise ValueError("tensors are on a GPU that is not visible here")
        given[_DEVICE] = uuids.index(given[_DEVICE])
    rebuilt: Tensor = rebuild_cuda_tensor(*given)
    return rebuilt


def _dtype_of(value: Any) -> torch.dtype:
    name = value.name.removeprefix("torch.") if isinstance(value, Global) else "?"
    if name not in DTYPES:
        raise ValueError(f"the dtype {name[:40]} is not supported")
    return DTYPES[name]


def _size_of(value: Any) -> tuple[int, ...]:
    sizes = value.args[0] if isinstance(value, Record) and value.args else value
    return TensorInfo.from_json(["", "uint8", list(sizes)]).shape


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("the name of a tensor is no text")
    return name
