"""What a torch distributed checkpoint holds, read without executing its pickle."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.checkpoint.reading.pickle_reader import PickleReader, Record
from megatron_async.checkpoint.reading.regular_files import is_regular_file, read_file
from megatron_async.checkpoint.reading.torch_archive import FUNCTIONS
from megatron_async.errors import CheckpointError
from megatron_async.megatron_compat import checkpoints

METADATA_FILE = ".metadata"
MOST_METADATA_BYTES = 2**29
MOST_DIMENSIONS = 16
MOST_HEADER_BYTES = 2**20
"""A stored tensor has at most this many bytes beyond its elements."""

_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_NAMES = frozenset(
    [f"{_DCP}.metadata.{name}" for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )]
    + [f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")]
    + [f"{_DCP}.planner.{name}" for name in (
        "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )]
    + [f"{_MCORE}.MCoreMetadata", f"{_MCORE}.MCoreSavePlan"]
    + ["pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath"]
    + ["torch.serialization._get_layout"]
    + [f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One block of a stored tensor: ``sizes`` elements at ``offsets``, bytes of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``shape`` that disjoint chunks cover."""

    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.name.endswith(name)


def _ints(what: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > MOST_DIMENSIONS:
        raise ValueError(f"{what} is not a tuple of sizes")
    if any(type(x) is not int or not 0 <= x < 2**62 for x in value):
        raise ValueError(f"{what} has a number that is no size")
    return value


def _storage(metadata: Record, directory: Path) -> dict[Any, tuple[Path, int, int]]:
    """(name, offsets) to (file, start, length); an object has offsets ``None``."""
    places = {}
    for index, info in metadata.field("storage_data", dict).items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise ValueError("storage_data has an entry of another kind")
        name = index.field("fqn", str)
        offsets = index.state.get("offset")
        if offsets is None and name != checkpoints.COMMON_OBJECT:  # an object that is never read
            continue
        file = info.field("relative_path", str)
        if not file.isprintable() or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} is not a file of the directory")
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{file}: transformed (compressed) storage is not supported")
        what = f"offset, length of {name}"
        start, length = _ints(what, (info.field("offset", int), info.field("length", int)))
        at = None if offsets is None else _ints(f"offset of {name}", offsets)
        places[name, at] = (directory / file, start, length)
    return places


def _stored_tensor(name: str, record: Record, places: dict[Any, Any]) -> StoredTensor:
    shape = _ints(f"size of {name}", record.field("size", tuple))
    chunks = []
    for chunk in record.field("chunks", list):
        if not isinstance(chunk, Record):
            raise ValueError(f"{name}: a chunk of another kind")
        offsets = _ints(f"offsets of {name}", chunk.field("offsets", tuple))
        sizes = _ints(f"sizes of {name}", chunk.field("sizes", tuple))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"{name}: a chunk has another number of dimensions")
        if any(o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name}: a chunk reaches past the tensor")
        if (name, offsets) not in places:
            raise ValueError(f"{name}: the chunk at {offsets} is in no file")
        stored = StoredChunk(offsets, sizes, *places[name, offsets])
        if stored.length > 8 * math.prod(sizes) + MOST_HEADER_BYTES:
            raise ValueError(f"{name}: length={stored.length} is too much for {list(sizes)}")
        chunks.append(stored)
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"{name}: its chunks do not cover it")
    return StoredTensor(shape, tuple(chunks))


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """The stored tensors by name; stored objects (pickles) are left out.

    Raises:
        CheckpointError: ``.metadata`` is missing, too large or corrupt, or holds anything but the
            metadata classes of torch and megatron-core. Nothing in it has been executed then.
    """
    with _refusing(directory / METADATA_FILE):
        metadata = _metadata(directory / METADATA_FILE)
        places = _storage(metadata, directory)
        return {
            str(name): _stored_tensor(str(name), record, places)
            for name, record in metadata.field("state_dict_metadata", dict).items()
            if _is_a(record, "TensorStorageMetadata")
        }


def common_object(directory: Path) -> tuple[Path, int, int] | None:
    """File, start and length of what all ranks have in common, where it is a stored object, as
    megatron-core keeps it since 0.19; None where there is none.

    Raises:
        CheckpointError: as :func:`read_metadata`.
    """
    if not is_regular_file(directory / METADATA_FILE):
        return None
    with _refusing(directory / METADATA_FILE):
        places = _storage(_metadata(directory / METADATA_FILE), directory)
        return places.get((checkpoints.COMMON_OBJECT, None))


def _metadata(path: Path) -> Record:
    data = read_file(path, MOST_METADATA_BYTES)
    metadata = PickleReader(data, _NAMES.__contains__, FUNCTIONS).load()
    if not isinstance(metadata, Record) or not _is_a(metadata, "Metadata"):
        raise ValueError("holds no Metadata")
    return metadata


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, MemoryError) as error:
        raise CheckpointError(f"{path}: refused: {one_line(error)}") from error
