"""Files of ``torch.save``, read without executing anything and without unpacking more than they
hold."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from megatron_async.checkpoint.reading.pickle_reader import (
    Global,
    PickleReader,
    PickleReadError,
    Record,
)

_ZIP = b"PK"
_LEGACY_PARTS = 3
"""Pickles before the object in a file of torch before 1.6: magic number, protocol, system."""

_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}
_REBUILD = "torch._utils._rebuild_"
_STORAGE = "storage"

# Inert here, so all that matters is that nothing is taken for what it is not.
_PREFIXES = ("megatron.", "numpy.", "torch._utils._rebuild_", "pathlib.", "signal.")
_NAMES = frozenset(
    {
        "argparse.Namespace",
        "_codecs.encode",
        "builtins.complex",
        "builtins.bytearray",
        "datetime.timedelta",
        "torch.device",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
    }
    | {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    | {f"torch.{name}" for name in vars(torch) if name.endswith("Storage")}
    | {"torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
)


def member(owner: Any, name: Any) -> Record:
    """Stands for ``getattr``, by which Python up to 3.11.3 pickles the members of an enumeration: a
    record of that class, not an attribute of anything."""
    plain = isinstance(name, str) and not name.startswith("_")
    if not (isinstance(owner, Global) and owner.name != "argparse.Namespace" and plain):
        raise PickleReadError("builtins.getattr is not allowed")
    return Record(owner.name, (name,))


def _size(items: Any) -> tuple[Any, ...]:
    if type(items) is not tuple:
        raise PickleReadError("a torch.Size of what is no tuple")
    return items


# None of them copies: a pickle could ask for it again and again.
FUNCTIONS: dict[str, Any] = {
    "builtins.getattr": member,
    "builtins.set": lambda items=(): items,
    "builtins.frozenset": lambda items=(): items,
    "collections.OrderedDict": lambda: {},
    "collections.defaultdict": lambda factory=None: {},
    "torch.Size": _size,
}


def _allows(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _persistent(identity: Any) -> Record:
    return Record(_STORAGE, identity if isinstance(identity, tuple) else (identity,))


class _Archive:
    """A zip file whose records are stored as they are."""

    def __init__(self, data: bytes) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        records = self._zip.infolist()
        packed = next((r for r in records if r.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None:
            raise PickleReadError(f"{packed.filename} is compressed, as torch.save never does")
        if sum(record.file_size for record in records) > len(data):
            raise PickleReadError("its records are larger than the file")
        names = [r.filename for r in records if r.filename.endswith("/data.pkl")]
        if len(names) != 1:
            raise PickleReadError("has no data.pkl")
        self._prefix = names[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._zip.namelist() and self._zip.read(order) != b"little":
            raise PickleReadError("is of a machine of another byte order")

    def read(self, name: str) -> bytes:
        return self._zip.read(f"{self._prefix}{name}")


def read_object(data: bytes) -> Any:
    """The object in a file of ``torch.save``: plain values, and :class:`Record` for all else.

    Raises:
        PickleReadError: it holds what is not allowed, or is no such file. A corrupt zip file may
            raise anything else.
    """
    if data.startswith(_ZIP):
        return PickleReader(_Archive(data).read("data.pkl"), _allows, FUNCTIONS, _persistent).load()
    reader = PickleReader(data, _allows, FUNCTIONS, _persistent)
    for _ in range(_LEGACY_PARTS):
        reader.load()
    return reader.load()


def read_tensor(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of ``shape`` that is all of a file of ``torch.save``, on the CPU.

    Raises:
        PickleReadError: it holds anything else, or a tensor without all its values. A corrupt zip
            file may raise anything else.
    """
    archive = _Archive(data)
    found = PickleReader(archive.read("data.pkl"), _allows, FUNCTIONS, _persistent).load()
    tensor = _plain_tensor(found)
    storage, offset, size, stride = tensor.args[:4]
    if size != shape:
        raise PickleReadError(f"not a tensor of {list(shape)}")
    if not isinstance(storage, Record) or storage.name != _STORAGE or len(storage.args) != 5:
        raise PickleReadError("a tensor without a storage")
    _, kind, key, _, _ = storage.args
    if not isinstance(kind, Global) or kind.name not in _DTYPES:
        stored = kind.name if isinstance(kind, Global) else "an unknown storage"
        supported = ", ".join(_DTYPES)
        raise PickleReadError(f"stored as {stored}, not a float; supported are {supported}")
    if not isinstance(key, str):
        raise PickleReadError("a storage without a name")
    strides_fit = isinstance(stride, tuple) and len(stride) == len(shape)
    if type(offset) is not int or not strides_fit or any(type(x) is not int for x in stride):
        raise PickleReadError("a tensor without plain sizes")
    content = bytearray(archive.read(f"data/{key}"))
    if not content or 0 in shape:
        return torch.empty(shape, dtype=_DTYPES[kind.name])
    return torch.frombuffer(content, dtype=_DTYPES[kind.name]).as_strided(size, stride, offset)


def _plain_tensor(found: Any) -> Record:
    """The record of ``_rebuild_tensor_v2``, below what a parameter or attributes add to it."""
    for _ in range(3):
        if not isinstance(found, Record) or not found.name.startswith(_REBUILD):
            break
        kind = found.name.removeprefix(_REBUILD)
        if kind == "tensor_v2" and len(found.args) >= 4:
            return found
        if kind in ("parameter", "parameter_with_state") and found.args:
            found = found.args[0]
        elif kind == "from_type_v2" and len(found.args) == 4:
            function, _, args, _ = found.args
            if not isinstance(function, Global) or not isinstance(args, tuple):
                break
            found = Record(function.name, args)
        else:
            what = kind.replace("_", " ")
            raise PickleReadError(f"a {what}; give a tensor with all its values")
    raise PickleReadError("not a tensor")
