"""How ranks that a launcher has started find each other.

The launcher's store is for all processes that reach it, so it is told nothing but where each rank
is. On one host ranks meet at a Unix socket that this user alone can reach. Over hosts they meet at
an address of rank 0, and prove to each other that they know a secret, which the user has given to
all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_async.errors import ConfigError, RankDiedError
from megatron_async.processes.call import Call
from megatron_async.processes.private_folder import (
    check_private_folder,
    is_of_this_user,
    listen_privately,
)
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.rendezvous.door import HELLO_SECONDS, Door, knock
from megatron_async.ranks.rendezvous.hosts import address_of_leader, given_secret, listen_as_leader
from megatron_async.ranks.rendezvous.shared import Shared
from megatron_async.version import __version__

START_SECONDS = 600.0
POLL_SECONDS = 0.2
RETRY_SECONDS = 0.1
MOST_BYTES = 4096
"""The store's answer has at most this many bytes."""
SOCKET_NAME = "ranks"


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
        if rank == 0 and _leads_store():
            return _serve_store(started), rank
        store, rank, _ = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE are not set as a launcher does ({error}): unset them, or start "
            "with torchrun"
        ) from error
    return store, rank


def _leads_store() -> bool:
    """The launcher has a place for the store, and no store."""
    needed = {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return not has_agent and needed <= os.environ.keys()


def _serve_store(world_size: int) -> dist.Store:
    """Serve torch's store; torch itself would listen at all addresses of the host."""
    port = environment_number("MASTER_PORT", 0)
    with listen_as_leader(port) as server:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"], server.getsockname()[1], world_size, is_master=True,
            wait_for_workers=False, multi_tenant=True, master_listen_fd=os.dup(server.fileno()),
        )  # fmt: skip


def accept_all(
    store: dist.Store, world_size: int, share: Callable[[], Shared], check: Callable[[], None]
) -> tuple[dict[int, Call], bool]:
    """Rank 0: connections to all others by rank, and whether all are on this host.

    Args:
        share: what ranks of one host are handed, if they are.
        check: raises when one will not come any more.

    Raises:
        ConfigError: one has not come, or is of another version; or they are on several hosts, and
            the user has not said how they meet.
        RankDiedError: one has come and gone.
    """
    deadline = time.monotonic() + START_SECONDS
    hosts = {_get(store, f"host {rank}", deadline, check) for rank in range(1, world_size)}
    for rank in range(1, world_size):  # set ahead of the host
        said = _get(store, f"version {rank}", deadline, check)
        if said != __version__.encode():
            version = said[:20].decode(errors="replace")
            raise ConfigError(
                f"rank {rank} runs megatron-async {version} and rank 0 {__version__}: install one "
                "version on all hosts"
            )
    if hosts != {host_identity().encode()}:
        secret = given_secret()
        server = listen_as_leader(0)
        with Door(server, world_size, secret) as door:
            place = [address_of_leader(), server.getsockname()[1]]
            return _come_in(store, door, place, deadline, check), False
    shared = share()
    path = f"{shared.folder}/{SOCKET_NAME}"
    with Door(listen_privately(path, world_size), world_size, b"", shared.hand_to) as door:
        return _come_in(store, door, path, deadline, check), True


def _come_in(
    store: dist.Store,
    door: Door,
    place: str | list[object],
    deadline: float,
    check: Callable[[], None],
) -> dict[int, Call]:
    store.set("address", json.dumps([place]))
    while door.missing:
        check()
        try:
            door.wait(POLL_SECONDS)
        except EOFError as error:
            raise RankDiedError(f"{error}, before all were there") from None
        if time.monotonic() > deadline:
            raise ConfigError(f"{door.missing} ranks have not come; start all")
    return door.calls


def _get(store: dist.Store, key: str, deadline: float, check: Callable[[], None]) -> bytes:
    try:
        while not store.check([key]):
            check()
            if time.monotonic() > deadline:
                raise ConfigError(f"the process that sets {key!r} has not come; start all ranks")
            time.sleep(0.01)
        value: bytes = store.get(key)
    except dist.DistError as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"the store of the ranks has gone, and rank 0 with it: {said}") from None
    if len(value) > MOST_BYTES:
        raise ConfigError(f"the store of the ranks has {len(value)} bytes as {key!r}")
    return value


def connect(store: dist.Store, rank: int) -> tuple[Call, Shared | None]:
    """A follower: its connection to rank 0, and what it shares with it, if they are on one host.

    Raises:
        ConfigError: rank 0 does not come or has another secret, or the store says something else
            than where it is.
    """
    deadline = time.monotonic() + START_SECONDS
    store.set(f"version {rank}", __version__)
    store.set(f"host {rank}", host_identity())
    place = _place(_get(store, "address", deadline, lambda: None))
    secret = b"" if isinstance(place, str) else given_secret()
    while True:
        try:
            connection = _reach(place)
            try:
                proofs = knock(connection, rank, secret)
                shared = Shared.take_from(connection) if isinstance(place, str) else None
                return proofs.call(connection, leads=False), shared
            except BaseException:
                connection.close()
                raise
        except OSError as error:  # it may have no room for more visitors
            # It listens before it says where, until all have come.
            has_gone = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
            if has_gone or time.monotonic() > deadline:
                raise ConfigError(f"rank {rank} does not reach rank 0: {error}") from None
            time.sleep(RETRY_SECONDS)


def _place(said: bytes) -> str | tuple[str, int]:
    """Read the place of rank 0: a path, or a host and a port."""
    try:
        (place,) = json.loads(said)
    except (ValueError, TypeError):
        place = None
    if isinstance(place, str) and os.path.isabs(place):
        check_private_folder(os.path.dirname(place))
        return place
    match place:
        case [str(host), int(port)] if 0 < port < 1 << 16:
            return host, port
    raise ConfigError("the store of the ranks does not say where rank 0 is")


def _reach(place: str | tuple[str, int]) -> socket.socket:
    if not isinstance(place, str):
        return socket.create_connection(place, HELLO_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HELLO_SECONDS)
        connection.connect(place)
        if not is_of_this_user(connection):
            raise ConfigError(f"{place} is a socket of another user")
    except BaseException:
        connection.close()
        raise
    return connection
