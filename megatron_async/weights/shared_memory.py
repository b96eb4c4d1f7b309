"""Weights that another process of the same host reads where they lie: GPU memory by CUDA IPC, and
host memory as a file in memory.

Handles are plain data, so that they can go over any connection: no pickle is needed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.processes.private_folder import let_go, make_private_file
from megatron_async.weights.tensor_info import TensorInfo, announced, infos_of, weights_of

ALIGNMENT = 64
"""Bytes to which tensors are aligned in host memory."""
PIECE = 1 << 20
"""Bytes that one thread reads at a time."""
MAX_THREADS = 8
"""That read. Two are faster than one copy by one thread, and the engine takes no step meanwhile."""
_IN_MEMORY = Path("/dev/shm")
_POPULATE_READ = 22
_POPULATE_WRITE = 23  # MADV_POPULATE_READ and _WRITE, which the module mmap does not name

# What ``reduce_tensor`` says of a CUDA tensor behind its class, with "device" as a UUID.
_CUDA_FIELDS = (
    "size", "stride", "offset", "storage", "dtype", "device", "handle", "storage_bytes",
    "storage_offset", "requires_grad", "counter", "counter_offset", "event", "event_sync",
)  # fmt: skip
_CUDA_BYTES = ("handle", "counter", "event")


class SharedWeights:
    """The trainer's side. CUDA tensors are read where they are: they must stay as they are until
    the engine has taken them. Tensors of the CPU are copied into a file in memory, which is made
    once, with all its pages, and used again. It goes away with this object, or with the process.

    Args:
        tensors: by megatron-core's parameter names; what :meth:`export` shows.

    Raises:
        CheckpointError: there are none, they are on several kinds of devices, one has a dtype
            that is not sent, or there is no room for the file.
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
            self._offsets, self._size = _offsets_of(self._infos)
            self._path = _file_in_memory()
            self._end = weakref.finalize(self, _remove, self._path, os.getpid())
            whole = _room(self._path, self._size)
            self._views = _views(whole, self._infos, self._offsets)

    def export(self) -> dict[str, Any]:
        """Handles of the tensors as they are now, in JSON's types, for :func:`open_weights` to be
        called once with. Waits for the device.

        Raises:
            CheckpointError: this is closed, or its file was removed or cut short.
        """
        infos = [info.to_json() for info in self._infos]
        if self._path is None:
            for device in {tensor.device for tensor in self._tensors.values()}:
                torch.cuda.synchronize(device)
            cuda = [_cuda_handle(tensor) for tensor in self._tensors.values()]
            return {"kind": "cuda", "tensors": infos, "handles": cuda}
        # A write to a page that is gone would end the process.
        if not self._path.is_file() or self._path.stat().st_size < self._size:
            raise CheckpointError(
                f"{self._path} is closed, removed or cut short; make new SharedWeights"
            )
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
            return OpenedWeights(Path(handles["path"]), infos)
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


def _room(path: Path, size: int) -> Tensor:
    """uint8 [size]: the file's memory. All its pages are made here: a write to a page that there is
    no memory for would end the process."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise CheckpointError(
                f"{path.parent} has no room for {size:,} bytes of shared weights: {error.strerror}"
            ) from error
        memory = mmap.mmap(file.fileno(), size)
    with contextlib.suppress(OSError):  # of Linux 5.14 and later; else the first copy does it
        memory.madvise(_POPULATE_WRITE)
    return _whole(memory)


def _whole(memory: mmap.mmap | bytes) -> Tensor:
    """uint8, over all of a file."""
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0).byte()


def _views(whole: Tensor, infos: Sequence[TensorInfo], offsets: Sequence[int]) -> list[Tensor]:
    return [
        whole[offset : offset + info.nbytes].view(info.dtype).view(info.shape)
        for info, offset in zip(infos, offsets, strict=True)
    ]


class OpenedWeights(dict[str, Tensor]):
    """Tensors over a trainer's file in memory, by name. :meth:`copy_into` reads the file into a
    parameter without them: a mapping's new pages take as long as the copy.

    Attributes:
        has_pages: the mapping was kept from an earlier update, so a copy through it is faster.

    Raises:
        CheckpointError: the file is not there, or has another size.
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        offsets, self._size = _offsets_of(infos)
        self._path = path
        if not path.is_file() or path.stat().st_size != self._size:  # torch would make or extend it
            raise CheckpointError(
                f"{path} does not hold the {self._size:,} bytes of shared weights"
            )
        self._file: BinaryIO = path.open("r+b", buffering=0)  # closed with this object
        memory, self.has_pages = _mapped(self._file, self._size) if self._size else (b"", False)
        views = _views(_whole(memory), infos, offsets)
        super().__init__({info.name: view for info, view in zip(infos, views, strict=True)})
        self._offsets = {info.name: offset for info, offset in zip(infos, offsets, strict=True)}

    def check(self) -> None:
        """Raise CheckpointError if the file was cut short since it was opened."""
        if os.fstat(self._file.fileno()).st_size < self._size:
            raise CheckpointError(f"{self._path} was cut short, and none of its weights was taken")

    def copy_into(self, shares: Mapping[str, Target]) -> None:
        """Read each of these tensors from the file into its parameter.

        Raises:
            RuntimeError: the file was cut short while it was read, and some were copied.
        """
        direct = {n: share for n, share in shares.items() if share.holds_as_stored(self[n])}
        threads = min(len(os.sched_getaffinity(0)), max(torch.get_num_threads(), 2), MAX_THREADS)
        with ThreadPoolExecutor(threads) as pool:

            def read(targets: Mapping[str, Tensor]) -> None:
                every = (self._pieces(name, target) for name, target in targets.items())
                for _ in pool.map(self._read, itertools.chain.from_iterable(every)):
                    pass

            read({name: share.view.detach() for name, share in direct.items()})
            for name in [name for name in shares if name not in direct]:  # scales come first
                staged = torch.empty_like(self[name])
                read({name: staged})
                shares[name].copy_from(staged)

    def _pieces(self, name: str, target: Tensor) -> Iterator[tuple[int, memoryview]]:
        """Where in the file each piece of a tensor is, and its bytes in ``target``."""
        room = target.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(room), PIECE):
            yield self._offsets[name] + start, room[start : start + PIECE]

    def _read(self, piece: tuple[int, memoryview]) -> None:
        offset, room = piece
        while room:
            count = os.preadv(self._file.fileno(), [room], offset)
            if not count:
                raise RuntimeError(f"{self._path} was cut short while its weights were read")
            offset, room = offset + count, room[count:]


# --- mappings that are kept -------------------------------------------------------------------


class _Mapping:
    """A trainer's file, whose pages are this process's too. No tensor: a thread that frees one
    while the interpreter ends is the end of the process."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.memory = mmap.mmap(file.fileno(), size)
        self.has_pages = False

    def make_pages(self) -> None:
        """Piece by piece, since each holds the interpreter. That a file was cut short is an error
        here, as it is for a read, and not the end of the process."""
        for start in range(0, len(self.memory), 4 * PIECE):
            length = min(4 * PIECE, len(self.memory) - start)
            self.memory.madvise(_POPULATE_READ, start, length)
        self.has_pages = True


_kept: dict[tuple[int, int], _Mapping] = {}
"""By device and inode, while the trainer has its file locked: until it closes it, or ends."""
_keeping = threading.Lock()
os.register_at_fork(after_in_child=_kept.clear)  # the threads are the parent's


def _mapped(file: BinaryIO, size: int) -> tuple[mmap.mmap, bool]:
    """The file's memory, and whether its pages were made behind an earlier update."""
    status = os.fstat(file.fileno())
    key = status.st_dev, status.st_ino
    with _keeping:
        found = _kept.get(key)
        if found is not None and len(found.memory) == size:
            return found.memory, found.has_pages
        made = _Mapping(file, size)
        lock = open(f"/dev/fd/{file.fileno()}", "rb")  # noqa: SIM115 - the thread closes it
        if _is_let_go(lock):
            lock.close()
            return made.memory, False
        _kept[key] = made
    threading.Thread(target=_keep, args=(key, made, lock), name="weights", daemon=True).start()
    return made.memory, False


def _is_let_go(lock: BinaryIO) -> bool:
    """Nobody has locked the file, or its file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _keep(key: tuple[int, int], mapping: _Mapping, lock: BinaryIO) -> None:
    """Keep a mapping for as long as the trainer has its file locked."""
    with lock:
        with contextlib.suppress(OSError):  # it was cut short, or Linux is older than 5.14
            mapping.make_pages()
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
    with _keeping:
        if _kept.get(key) is mapping:
            del _kept[key]


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
