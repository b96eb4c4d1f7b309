"""What processes listen at, share and keep open, and what of it another user could open."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LISTENS = 0x10000
"""A flag of /proc/net/unix."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/tmp/", "/var/tmp/", "/run/")


@dataclass(frozen=True)
class Opening:
    """One of them.

    Args:
        kind: "tcp", "udp", "unix", or "file", which shared memory is too.
        name: an address, or a path.
        owner, mode: of what has a path; -1 of what has none.
        wrong: why another user could open it; empty if none could.
    """

    pid: int
    kind: str
    name: str
    owner: int
    mode: int
    wrong: str


def marked(mark: str) -> list[int]:
    """Processes that live and have ``mark``, ``NAME=VALUE``, in the environment they began with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in variables:
            found.append(int(folder.name))
    return found


def openings(pids: Iterable[int]) -> list[Opening]:
    """All of some processes."""
    return [each for pid in pids for each in (*_ports(pid), *_unix_sockets(pid), *_files(pid))]


def openings_below(folder: Path) -> list[Opening]:
    """All files and sockets in a directory that anybody may enter."""
    found = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [_with_path(0, "file", str(path)) for path in found if not path.is_dir()]


def _ports(pid: int) -> Iterator[Opening]:
    for each in psutil.Process(pid).net_connections(kind="inet"):
        if each.status == psutil.CONN_LISTEN or (each.status == psutil.CONN_NONE and each.laddr):
            address = ipaddress.ip_address(each.laddr.ip)
            address = getattr(address, "ipv4_mapped", None) or address
            wrong = "" if address.is_loopback else "listens at an address that others reach"
            kind = "tcp" if each.status == psutil.CONN_LISTEN else "udp"
            yield Opening(pid, kind, f"{each.laddr.ip}:{each.laddr.port}", -1, -1, wrong)


def _unix_sockets(pid: int) -> Iterator[Opening]:
    own = {name for _, name in _descriptors(pid) if name.startswith("socket:")}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if f"socket:[{inode}]" not in own or not int(flags, 16) & LISTENS:
            continue
        name = path[0] if path else ""
        if name.startswith("/"):
            yield _with_path(pid, "unix", name)
        else:
            yield Opening(pid, "unix", name, -1, -1, "anybody finds an abstract socket")


def _files(pid: int) -> Iterator[Opening]:
    """In memory, or where temporary files are; mapped or open."""
    paths = {path: name for path, name in _descriptors(pid) if name.startswith(SHARED)}
    for path, name in paths.items():
        if name.endswith(" (deleted)"):
            found = os.stat(path)
            wrong = "others may open it" if found.st_mode & OTHERS else ""
            yield Opening(pid, "file", name, found.st_uid, stat.S_IMODE(found.st_mode), wrong)
        else:
            yield _with_path(pid, "file", name)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, rights, _, _, _, *rest = line.split(maxsplit=5)
        if rest and rights.endswith("s") and rest[0].startswith(SHARED):
            name = rest[0]
            if not name.endswith(" (deleted)"):
                yield _with_path(pid, "file", name)
            elif name not in paths.values() and not name.startswith("/dev/shm/plasma"):
                yield Opening(pid, "file", name, -1, -1, "")


def _with_path(pid: int, kind: str, name: str) -> Opening:
    found = os.stat(name)
    mode = stat.S_IMODE(found.st_mode)
    wrong = "others may open it" if mode & OTHERS and _is_reached_by_others(Path(name)) else ""
    if found.st_uid != os.getuid():
        wrong = "it is another user's"
    return Opening(pid, kind, name, found.st_uid, mode, wrong)


def _is_reached_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH) for parent in path.parents)


def _descriptors(pid: int) -> list[tuple[str, str]]:
    """Each path below /proc, and what it is."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append((str(path), os.readlink(path)))
        except OSError:
            continue
    return found
