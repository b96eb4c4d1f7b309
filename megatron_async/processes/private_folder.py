"""Directories of this user's alone: for Unix sockets and for what processes of one host share."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from megatron_async.errors import ConfigError

MAX_SOCKET_PATH = 100
"""Bytes of a socket's path that every system takes."""
PREFIX = "megatron-async-"


def make_private_folder(longest_name: str, parent: str | None = None) -> str:
    """A new directory of mode 0700, for sockets whose names are not longer than ``longest_name``.

    Args:
        parent: None is where temporary files are.

    Raises:
        ConfigError: its path is too long for them, or it cannot be made.
    """
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/" + longest_name):
        Path(folder).rmdir()
        name = "TMPDIR" if parent is None else "RAY_TMPDIR"
        raise ConfigError(
            f"{name}={parent or tempfile.gettempdir()!r} is too long for the path of a Unix "
            f"socket; set {name} to a shorter one"
        )
    return folder


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
