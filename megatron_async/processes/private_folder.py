"""Directories and files of this user's alone: for Unix sockets and for what processes of one host
share.

The process that makes one holds a lock (flock) on it, which the kernel gives back when the process
has ended, however that was. So the next one that makes any can tell what the dead have left from
what belongs to the living, in whatever container they are, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator

from megatron_async.errors import ConfigError

MAX_SOCKET_PATH = 100
"""Bytes of a socket's path that every system takes."""
PREFIX = "megatron-async-"
HELD_FILE = f"{PREFIX}held-"
OWNER = "owner"
"""The file in a directory that its owner has locked."""

_held: dict[str, int] = {}
"""Descriptors of locked files, by what is this process's."""


def make_private_folder(longest_name: str, parent: str | None = None) -> str:
    """A new directory of mode 0700, for sockets whose names are not longer than ``longest_name``.

    Args:
        parent: None is where temporary files are.

    Raises:
        ConfigError: its path is too long for them, or it cannot be made.
    """
    remove_leftovers(parent or tempfile.gettempdir())
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        while not _hold(folder, f"{folder}/{OWNER}"):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or 'a directory for temporary files'}: {error.strerror}"
        ) from None
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/" + longest_name):
        remove_private_folder(folder)
        name = "TMPDIR" if parent is None else "RAY_TMPDIR"
        raise ConfigError(
            f"{name}={parent or tempfile.gettempdir()!r} is too long for the path of a Unix "
            f"socket; set {name} to a shorter one"
        )
    return folder


def renew_private_folder(folder: str) -> None:
    """Make a directory of this process's again if somebody has removed it: what cleans up temporary
    files does.

    Raises:
        ConfigError: there is something else in its place.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    check_private_folder(folder)
    if not os.path.exists(f"{folder}/{OWNER}"):
        let_go(folder)
        _hold(folder, f"{folder}/{OWNER}")


def remove_private_folder(folder: str) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    let_go(folder)


@contextlib.contextmanager
def private_folder(longest_name: str) -> Iterator[str]:
    """One of :func:`make_private_folder`, for a while."""
    folder = make_private_folder(longest_name)
    try:
        yield folder
    finally:
        remove_private_folder(folder)


def make_private_file(kind: str, parent: str) -> str:
    """A new empty file of mode 0600, with ``kind`` in its name; see :func:`let_go`."""
    remove_leftovers(parent)
    while True:
        descriptor, path = tempfile.mkstemp(prefix=f"{HELD_FILE}{kind}-", dir=parent)
        os.close(descriptor)
        if _hold(path, path):
            return path


# --- owners ------------------------------------------------------------------------------


def let_go(path: str) -> None:
    """What was made here is nobody's any more. A file is removed by the next process that makes
    one, unless it was before; a directory whose ``owner`` was removed stays."""
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def disown(folder: str) -> None:
    """Nobody removes a directory when this process has ended."""
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{OWNER}")
    let_go(folder)


def remove_leftovers(parent: str) -> None:
    """Remove what processes of this user have made in ``parent`` and left when they died."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_leftover(entry)


def _remove_leftover(entry: os.DirEntry[str]) -> None:
    is_folder = entry.is_dir(follow_symlinks=False)
    if not is_folder and not entry.name.startswith(HELD_FILE):
        return
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    locked = f"{entry.path}/{OWNER}" if is_folder else entry.path
    descriptor = os.open(locked, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
        if is_folder:
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


def _hold(path: str, locked: str) -> bool:
    """Lock a file for as long as this process lives; False when somebody else has just taken it for
    a leftover."""
    descriptor = os.open(locked, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.stat(locked), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except OSError:  # a file system without locks, where nobody takes it for one
        is_there = True
    if is_there:
        _held[path] = descriptor
    else:
        os.close(descriptor)
    return is_there


# --- access ----------------------------------------------------------------------------


def check_private_folder(folder: str) -> None:
    """Raises ConfigError where another user could enter, or put another one in its place."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder} is no directory that this user alone may enter; remove it")


def make_private(folder: str) -> None:
    """Take what others may do from all that is in a directory of this user's."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):  # it has gone
                mode = os.lstat(path).st_mode
                if not stat.S_ISLNK(mode):
                    os.chmod(path, stat.S_IMODE(mode) & 0o700)


def listen_privately(path: str, backlog: int) -> socket.socket:
    """A Unix socket at a path in a private directory."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(backlog)
    except BaseException:
        server.close()
        raise
    return server


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket was this user's when it connected or
    began to listen. Where a system cannot tell, the directory of the socket is what counts."""
    name = getattr(socket, "SO_PEERCRED", None)
    if name is None:
        return True
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, name, size))
    return bool(uid == os.getuid())
