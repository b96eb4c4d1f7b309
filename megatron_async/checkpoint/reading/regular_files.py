"""Files of a model directory, by type and size before a byte is read.

A pipe would never end, a device neither, and a sparse file of gigabytes costs its owner nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from megatron_async.errors import CheckpointError

_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def unreadable(path: str | Path, error: OSError | ValueError) -> CheckpointError:
    """What a failing system call, or a name that is none, says of ``path``."""
    reason = error.strerror if isinstance(error, OSError) else "not a name of a file"
    return CheckpointError(f"{path}: cannot be read: {reason or type(error).__name__}")


def is_regular_file(path: Path) -> bool:
    """Whether ``path`` is a file; False where there is nothing.

    Raises:
        CheckpointError: it is there and is no regular file, or its name is none.
    """
    try:
        mode = os.stat(path).st_mode
    except _NOT_THERE:
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path}: is {kind}; it must be a regular file")
    return True


def is_directory(path: Path) -> bool:
    """Whether ``path`` is a directory; raises CheckpointError if its name is none."""
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def file_size(path: Path) -> int:
    """Bytes of the regular file ``path``; raises CheckpointError if it is none."""
    if not is_regular_file(path):
        raise CheckpointError(f"{path}: cannot be read: No such file or directory")
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def read_file(path: Path, most: int) -> bytes:
    """The content of the regular file ``path``, of at most ``most`` bytes.

    Raises:
        CheckpointError: it is missing, no regular file, larger, or cannot be read.
    """
    size = file_size(path)
    if size > most:
        raise CheckpointError(f"{path}: has {size:,} bytes; the most is {most:,}")
    return read_range(path, 0, size)


def read_range(path: Path, start: int, length: int) -> bytes:
    """``length`` bytes of ``path`` from ``start``, fewer at its end."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error


class Watched:
    """Files whose memory is read again later. Another file of the same name changes nothing; one
    that is cut short in the meantime would end the process.

    Raises:
        CheckpointError: one cannot be opened.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[Path, BinaryIO, tuple[int, int]]] = []
        for path in paths:
            try:
                file = path.open("rb")  # closed with this object
            except OSError as error:
                raise unreadable(path, error) from error
            self._files.append((path, file, _state(file)))

    def check(self) -> None:
        """Raise CheckpointError if one was written to."""
        for path, file, state in self._files:
            if _state(file) != state:
                said = "was written to while its weights were read, and none was taken"
                raise CheckpointError(f"{path}: {said}; write another file, and rename it")


def _state(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns
