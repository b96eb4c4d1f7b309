"""Rank 0's listening socket: a visitor that comes in is a rank, and any other keeps no rank out.

A rank proves that it knows the secret, and rank 0 proves the same, by HMACs over random numbers of
both, so that the secret itself is never sent. Between processes of one host the secret is empty:
there a Unix socket of this user says which user calls.

    rank 0 -> visitor: number of rank 0
    visitor -> rank 0: rank, number of the visitor, proof
    rank 0 -> visitor: proof of rank 0; zeros where the visitor's is wrong
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from megatron_async.errors import ConfigError
from megatron_async.processes.call import Call
from megatron_async.processes.private_folder import is_of_this_user
from megatron_async.ranks.rendezvous.call import SealedCall, receive_exactly

NUMBER_BYTES = 32
RANK = struct.Struct("<I")
PROOF_BYTES = 32
HELLO_BYTES = RANK.size + NUMBER_BYTES + PROOF_BYTES
HELLO_SECONDS = 5.0
"""For a visitor to say which rank it is."""
MOST_VISITORS = 64
"""That have not said it yet; the one that has waited longest goes when there are more."""
SILENT_SECONDS = 60
"""Until a host that has gone without a word ends its connections."""
logger = logging.getLogger(__name__)

REFUSED = bytes(PROOF_BYTES)
HUNG_UP = getattr(select, "POLLRDHUP", 0)


class Proofs(NamedTuple):
    """What both ends of one connection compute alike.

    Args:
        secret: empty between processes of one host.
        numbers: of rank 0 and of the other one, random for each connection.
    """

    secret: bytes
    numbers: bytes
    rank: int

    def of(self, what: bytes) -> bytes:
        """Nobody without the secret can compute it."""
        said = what + RANK.pack(self.rank) + self.numbers
        return hmac.digest(self.secret, said, hashlib.sha256)

    def call(self, connection: socket.socket, *, leads: bool) -> Call:
        """A call over a connection whose other end has proved itself."""
        connection.setblocking(True)
        if connection.family == socket.AF_UNIX:
            return Call(connection.detach())
        _end_with_host(connection)
        keys = self.of(b"messages of rank 0"), self.of(b"messages to rank 0")
        sends, receives = keys if leads else keys[::-1]
        return SealedCall(connection.detach(), sends, receives)


class Visitor:
    """A process that has connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + HELLO_SECONDS
        self._number = secrets.token_bytes(NUMBER_BYTES)
        self._said = b""
        connection.setblocking(False)
        connection.send(self._number)

    def hear(self, secret: bytes) -> Proofs | None:
        """What it says, as far as it has come; None as long as that is not all.

        Raises:
            OSError: it has gone, or has not the secret.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(HELLO_BYTES - len(self._said))
            if not data:
                raise ConnectionError("it has hung up")
            self._said += data
        if len(self._said) < HELLO_BYTES:
            return None
        (rank,) = RANK.unpack(self._said[: RANK.size])
        number, proof = self._said[RANK.size : -PROOF_BYTES], self._said[-PROOF_BYTES:]
        proofs = Proofs(secret, self._number + number, rank)
        if not hmac.compare_digest(proof, proofs.of(b"a rank")):
            self.connection.send(REFUSED)
            raise PermissionError("it has another secret")
        return proofs


class Door:
    """Lets in ranks 1 to ``world_size - 1``, each once.

    Args:
        server: a listening socket.
        secret: see :class:`Proofs`.
        admitted: told of each connection before it is used.

    Attributes:
        calls: by rank.
    """

    def __init__(
        self,
        server: socket.socket,
        world_size: int,
        secret: bytes,
        admitted: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        self.calls: dict[int, Call] = {}
        self._server = server
        self._missing = set(range(1, world_size))
        self._secret = secret
        self._admitted = admitted
        self._visitors: dict[int, Visitor] = {}
        self._has_warned = False
        server.setblocking(False)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exc: object) -> None:
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._server.close()

    @property
    def missing(self) -> int:
        """Ranks that have not come."""
        return len(self._missing)

    def wait(self, seconds: float) -> None:
        """Take a visitor that comes, or what one says, within ``seconds``.

        Raises:
            EOFError: a rank that had come has gone.
        """
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        for descriptor in self._visitors:
            poll.register(descriptor, select.POLLIN)
        for call in self.calls.values():
            poll.register(call.fileno(), HUNG_UP)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        for rank, call in self.calls.items():
            if call.fileno() in ready:
                raise EOFError(f"rank {rank} has come and gone")
        for descriptor in ready & self._visitors.keys():
            self._hear(descriptor)
        now = time.monotonic()
        for descriptor, visitor in list(self._visitors.items()):
            if visitor.until < now:
                self._send_away(descriptor)
        if self._server.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone already
            connection, _ = self._server.accept()
            if connection.family == socket.AF_UNIX and not is_of_this_user(connection):
                connection.close()
                return
            try:
                self._visitors[connection.fileno()] = Visitor(connection)
            except OSError:
                connection.close()
        if len(self._visitors) > MOST_VISITORS:
            self._send_away(next(iter(self._visitors)))

    def _hear(self, descriptor: int) -> None:
        visitor = self._visitors[descriptor]
        try:
            proofs = visitor.hear(self._secret)
            if proofs is None:
                return
            if proofs.rank not in self._missing:
                raise PermissionError("another one is that rank")
            visitor.connection.send(proofs.of(b"rank 0"))
            self._admitted(visitor.connection)
        except OSError as error:
            if isinstance(error, PermissionError) and not self._has_warned:
                self._has_warned = True  # once: anybody may come again and again
                logger.warning("somebody who is no rank of this group has come: %s", error)
            self._send_away(descriptor)
            return
        del self._visitors[descriptor]
        self._missing.remove(proofs.rank)
        self.calls[proofs.rank] = proofs.call(visitor.connection, leads=True)

    def _send_away(self, descriptor: int) -> None:
        self._visitors.pop(descriptor).connection.close()


def knock(connection: socket.socket, rank: int, secret: bytes) -> Proofs:
    """Say to rank 0 which rank this is, over a new connection with a timeout.

    Raises:
        ConfigError: it has another secret.
        OSError: it is not there any more, or has no time.
    """
    theirs = receive_exactly(connection, NUMBER_BYTES)
    own = secrets.token_bytes(NUMBER_BYTES)
    proofs = Proofs(secret, theirs + own, rank)
    connection.sendall(RANK.pack(rank) + own + proofs.of(b"a rank"))
    said = receive_exactly(connection, PROOF_BYTES)
    if not hmac.compare_digest(said, proofs.of(b"rank 0")):
        raise ConfigError(
            f"rank 0, which rank {rank} has found, has another secret: give all ranks the same"
        )
    return proofs


def _end_with_host(connection: socket.socket) -> None:
    """Have a connection over hosts end when the other host has gone without a word. Processes that
    stand still are no matter of it: their host's kernel answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", SILENT_SECONDS // 2), ("INTVL", SILENT_SECONDS // 6), ("CNT", 3)):
        if hasattr(socket, f"TCP_KEEP{name}"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)
