"""Sockets that listen at one address, where torch.distributed would listen at all of a host's."""

from __future__ import annotations

import socket

from megatron_async.errors import ConfigError, shown

MAX_PORT = 65535


def check_port(port: object) -> None:
    """Raises :class:`ConfigError` for what is no port that somebody listens at; some libraries take
    what is left of it over 65,536."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= MAX_PORT:
        raise ConfigError(f"port={shown(port)} must be an integer from 1 to {MAX_PORT}")


def listen_at(address: str, port: int) -> socket.socket:
    """A socket that accepts connections at a host's name or address.

    Args:
        port: 0 for any.

    Raises:
        OSError: that is no address of this host, or somebody else has the port.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(place)
        server.listen(socket.SOMAXCONN)
    except BaseException:
        server.close()
        raise
    return server


def own_address(address: str, port: int) -> str:
    """The address of this host at which another one, or this one, reaches it; raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect(place)  # nothing is sent
        return str(towards.getsockname()[0])
