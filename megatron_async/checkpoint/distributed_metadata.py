"""What a torch distributed checkpoint holds, read without executing its pickles.

``.metadata`` is a pickle of dataclasses. Here it is read by an unpickler whose only classes are
inert records made for that one call: they store what they are given and do nothing.
"""

from __future__ import annotations

import collections
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_async.checkpoint.json_file import one_line
from megatron_async.errors import CheckpointError

METADATA_FILE = ".metadata"

_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = frozenset(
    [(f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )]
    + [(f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")]
    + [(f"{_DCP}.planner", name) for name in (
        "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )]
    + [(_MCORE, "MCoreMetadata"), (_MCORE, "MCoreSavePlan")]
    + [("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")]
    + [("torch.serialization", "_get_layout")]
)  # fmt: skip
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}


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


class _Record:
    """Stands for an object of any class: keeps its arguments and state, runs nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    # On the class itself this lacks an argument: a pickle cannot set attributes of classes.
    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, kind: type) -> Any:
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f"{type(self).__name__}.{name} is not a {kind.__name__}")
        return value


def _member(owner: Any, name: Any) -> _Record:
    """Stands for ``getattr``, by which Python up to 3.11.3 pickles the members of an enumeration: a
    record of that class, not an attribute of anything."""
    if not (isinstance(owner, type) and issubclass(owner, _Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("builtins.getattr is not allowed")
    return owner(name)


class _RecordUnpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _VALUES:
            return _VALUES[key]
        if key == ("builtins", "getattr"):
            return _member
        if key not in _RECORDS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self._classes.setdefault(key, type(name, (_Record,), {}))


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and type(value).__name__ == name


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(x) is not int or x < 0 for x in value):
        raise ValueError(f"{value!r} is not a tuple of sizes")
    return value


def _storage(metadata: _Record, directory: Path) -> dict[Any, tuple[Path, int, int]]:
    """(name, offsets) to (file, start, length)."""
    places = {}
    for index, info in metadata.field("storage_data", dict).items():
        offsets = index.state.get("offset")
        if offsets is None:  # an object, which is never read
            continue
        file = info.field("relative_path", str)
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} is not a file of the directory")
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{file}: transformed (compressed) storage is not supported")
        start, length = _ints((info.state.get("offset"), info.state.get("length")))
        places[index.field("fqn", str), _ints(offsets)] = (directory / file, start, length)
    return places


def _stored_tensor(name: str, record: _Record, places: dict[Any, Any]) -> StoredTensor:
    shape = _ints(record.field("size", tuple))
    chunks = []
    for chunk in record.field("chunks", list):
        offsets, sizes = _ints(chunk.field("offsets", tuple)), _ints(chunk.field("sizes", tuple))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"{name}: a chunk has another number of dimensions")
        if any(o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name}: a chunk reaches past the tensor")
        if (name, offsets) not in places:
            raise ValueError(f"{name}: the chunk at {offsets} is in no file")
        chunks.append(StoredChunk(offsets, sizes, *places[name, offsets]))
    if sum(torch.Size(c.sizes).numel() for c in chunks) != torch.Size(shape).numel():
        raise ValueError(f"{name}: its chunks do not cover it")
    return StoredTensor(shape, tuple(chunks))


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """The stored tensors by name; stored objects (pickles) are left out.

    Raises:
        CheckpointError: ``.metadata`` is missing or corrupt, or holds anything but the metadata
            classes of torch and megatron-core. Nothing in it has been executed then.
    """
    path = directory / METADATA_FILE
    try:
        with open(path, "rb") as file:
            metadata = _RecordUnpickler(file).load()
        if not _is_a(metadata, "Metadata"):
            raise ValueError(f"holds a {type(metadata).__name__}, not Metadata")
        places = _storage(metadata, directory)
        return {
            str(name): _stored_tensor(name, record, places)
            for name, record in metadata.field("state_dict_metadata", dict).items()
            if _is_a(record, "TensorStorageMetadata")
        }
    except Exception as error:  # a corrupt pickle can raise anything
        raise CheckpointError(f"{path}: refused: {one_line(error)}") from error
