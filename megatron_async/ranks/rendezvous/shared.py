"""What the ranks of one host share, and how rank 0 hands it to the others: as a descriptor and a
path over a connection that is there already, so that nobody else can open it."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import NamedTuple

from megatron_async.errors import IntegrityError
from megatron_async.processes.private_folder import (
    check_private_folder,
    make_private_folder,
    remove_private_folder,
)
from megatron_async.ranks.rendezvous.call import receive_exactly

SIZE = struct.Struct("<I")
MOST_BYTES = 4096
STORE = "store"


class Shared(NamedTuple):
    """What all ranks of a host share.

    Args:
        folder: that this user alone may enter, with the store in which torch.distributed meets.
        ring: a descriptor of the memory of a ring, see ``channel.RingSender``.
    """

    folder: str
    ring: int

    @property
    def store(self) -> str:
        """Path of the file of a ``FileStore``."""
        return f"{self.folder}/{STORE}"

    def hand_to(self, other: socket.socket) -> None:
        """Give it to a process at the other end of a Unix socket."""
        data = json.dumps({"folder": self.folder}).encode()
        socket.send_fds(other, [SIZE.pack(len(data))], [self.ring])
        other.sendall(data)

    @classmethod
    def take_from(cls, other: socket.socket) -> Shared:
        """What rank 0 hands over; waits for it.

        Raises:
            ConfigError: the folder is not this user's alone.
            IntegrityError: it is something else.
            EOFError: rank 0 has gone.
        """
        head, descriptors, _, _ = socket.recv_fds(other, SIZE.size, 1)
        try:
            for each in descriptors:
                os.set_inheritable(each, False)
            if not head:
                raise ConnectionError("rank 0 has hung up")
            length = SIZE.unpack(head)[0] if len(head) == SIZE.size else MOST_BYTES + 1
            if length > MOST_BYTES or len(descriptors) != 1:
                raise IntegrityError("what rank 0 hands over is no folder and no ring")
            data = receive_exactly(other, length)
            try:
                folder = json.loads(data)["folder"]
            except (ValueError, TypeError, KeyError):
                folder = None
            if not isinstance(folder, str) or not os.path.isabs(folder):
                raise IntegrityError("what rank 0 hands over names no folder")
            check_private_folder(folder)
            return cls(folder, descriptors[0])
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise


def make_folder() -> str:
    """A folder for :class:`Shared`, with an empty store."""
    folder = make_private_folder(STORE)
    os.close(os.open(f"{folder}/{STORE}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return folder


def remove_folder(folder: str | None) -> None:
    """Remove the folder with all that is in it."""
    if folder is not None:
        remove_private_folder(folder)
