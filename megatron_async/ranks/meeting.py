"""How the ranks of a group find each other, and what connects them."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_async.errors import ConfigError
from megatron_async.ranks.layout import Layout
from megatron_async.version import __version__

START_SECONDS = 600.0
POLL_SECONDS = 0.2
SECRET_BYTES = 32
HELLO_SECONDS = 5.0
"""For whoever has connected to say which rank it is."""
SILENT_SECONDS = 60
"""Until a host that has gone without a word ends its connections."""
WAKE = b"\1"
BEAT = b"\2"
"""A question whether a rank still runs, and its answer."""


def host_identity() -> str:
    """The same for processes of one running system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    return socket.gethostname()


def environment_number(name: str, default: int) -> int:
    """What a launcher such as torchrun has set; raises :class:`ConfigError`."""
    said = os.environ.get(name) or str(default)
    if not said.isdecimal():
        raise ConfigError(
            f"{name}={said!r} is set, but not as a launcher does: unset it, or start with torchrun"
        )
    return int(said)


def environment_store(layout: Layout) -> tuple[dist.Store, int]:
    """The store and the rank of a launcher such as torchrun. What its environment says is checked
    before anybody is waited for.

    Raises:
        ConfigError: it is only there in part, or for another number of processes.
    """
    rank, started = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    if "WORLD_SIZE" in os.environ and (started != layout.world_size or rank >= started):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={started} are set, as by a launcher, and the parallel "
            f"sizes are those of {layout}: start {layout.world_size} processes, change the sizes, "
            "or unset both"
        )
    try:
        store, rank, _ = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE are not set as a launcher does ({error}): unset them, or start "
            "with torchrun"
        ) from error
    return store, rank


class Call(Connection):
    """A connection of whole messages that any thread may send to."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._sending = threading.Lock()

    def say(self, data: bytes) -> None:
        """Send; nothing happens where nobody listens: whoever reads learns of it."""
        with self._sending, contextlib.suppress(OSError):
            self.send_bytes(data)

    def say_at_once(self, data: bytes) -> None:
        """Send a few bytes, or nothing where that would have to wait."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):
                poll = select.poll()
                poll.register(self.fileno(), select.POLLOUT)
                if poll.poll(0):
                    self.send_bytes(data)
        finally:
            self._sending.release()

    def hang_up(self) -> None:
        """Close, also where another thread waits to send."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
        with self._sending:
            self.close()


def accept_all(
    store: dist.Store, world_size: int, ring_of: Callable[[], str], check: Callable[[], None]
) -> tuple[dict[int, Call], bool]:
    """Rank 0: connections to all others by rank, and whether all are on this host.

    Args:
        ring_of: makes the ring where they are, and gives its name.
        check: raises when one will not come any more.

    Raises:
        ConfigError: one has not come, or is of another version.
    """
    deadline = time.monotonic() + START_SECONDS
    hosts = {_get(store, f"host {rank}", deadline, check) for rank in range(1, world_size)}
    for rank in range(1, world_size):  # set ahead of the host
        if (version := store.get(f"version {rank}").decode()) != __version__:
            raise ConfigError(
                f"rank {rank} runs megatron-async {version} and rank 0 {__version__}: install one "
                "version on all hosts"
            )
    together = hosts == {host_identity().encode()}
    secret = secrets.token_bytes(SECRET_BYTES)
    with contextlib.ExitStack() as stack:
        family = socket.AF_UNIX if together else socket.AF_INET
        server = stack.enter_context(socket.socket(family))
        address: Any
        if together:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron-async-"))
            address = f"{folder}/ranks"
            server.bind(address)
        else:
            server.bind(("", 0))
            address = [os.environ.get("MASTER_ADDR", socket.gethostname()), server.getsockname()[1]]
        server.listen(world_size)
        server.settimeout(POLL_SECONDS)
        ring = ring_of() if together else None
        store.set("address", json.dumps([address, secret.hex(), ring]))
        found: dict[int, Call] = {}
        while len(found) < world_size - 1:
            check()
            with contextlib.suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                _end_with_host(accepted)
                call = Call(accepted.detach())
                said = _hello(call)
                if hmac.compare_digest(said[:SECRET_BYTES], secret):
                    found[int(said[SECRET_BYTES:])] = call
                else:
                    call.close()
            if time.monotonic() > deadline:
                raise ConfigError(f"{world_size - 1 - len(found)} ranks have not come; start all")
    return found, together


def _hello(call: Call) -> bytes:
    """What somebody says first; nothing of a stranger that is silent or says something else."""
    with contextlib.suppress(EOFError, OSError):
        if call.poll(HELLO_SECONDS):
            return call.recv_bytes(SECRET_BYTES + 8)
    return b""


def _end_with_host(connection: socket.socket) -> None:
    """Have a connection over hosts end when the other host has gone without a word. Processes that
    stand still are no matter of it: their host's kernel answers."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", SILENT_SECONDS // 2), ("INTVL", SILENT_SECONDS // 6), ("CNT", 3)):
        if hasattr(socket, f"TCP_KEEP{name}"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)


def _get(store: dist.Store, key: str, deadline: float, check: Callable[[], None]) -> bytes:
    while not store.check([key]):
        check()
        if time.monotonic() > deadline:
            raise ConfigError(f"the process that sets {key!r} has not come; start all ranks")
        time.sleep(0.01)
    value: bytes = store.get(key)
    return value


def connect(store: dist.Store, rank: int) -> tuple[Call, str | None]:
    """A follower: its connection to rank 0, and the name of the ring, if there is one."""
    store.set(f"version {rank}", __version__)
    store.set(f"host {rank}", host_identity())
    address, secret, ring = json.loads(store.get("address"))
    together = isinstance(address, str)
    client = socket.socket(socket.AF_UNIX if together else socket.AF_INET)
    client.connect(address if together else tuple(address))
    _end_with_host(client)
    call = Call(client.detach())
    call.say(bytes.fromhex(secret) + str(rank).encode())
    return call, ring
