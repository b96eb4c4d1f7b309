"""What the user says of ranks on several hosts: where rank 0 is met, and the secret of all."""

from __future__ import annotations

import os
import socket
import stat

from megatron_async.errors import ConfigError
from megatron_async.processes.listening import listen_at

SECRET = "MEGATRON_ASYNC_RANK_SECRET"
SECRET_FILE = "MEGATRON_ASYNC_RANK_SECRET_FILE"
BIND = "MEGATRON_ASYNC_RANK_BIND"
"""An address of rank 0's host at which it listens, where ``MASTER_ADDR`` is none of its own."""
FEWEST_BYTES = 16
MOST_BYTES = 4096


def given_secret() -> bytes:
    """What all ranks over hosts must know, and nobody else may.

    Raises:
        ConfigError: there is none, it is too short, or others may read it.
    """
    said, path = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if said is not None and path is not None:
        raise ConfigError(f"{SECRET} and {SECRET_FILE} are both set: unset one")
    if path is not None:
        secret = _content_of(path).strip()
    elif said is not None:
        secret = os.fsencode(said.strip())
    else:
        raise ConfigError(
            f"ranks on several hosts need a secret: set {SECRET}, or {SECRET_FILE} to the path of "
            "a file, to the same for all ranks, such as what `openssl rand -hex 32` gives"
        )
    if len(secret) < FEWEST_BYTES:
        name = SECRET if path is None else path
        raise ConfigError(f"the secret of {name} needs at least {FEWEST_BYTES} characters")
    return secret


def _content_of(path: str) -> bytes:
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
                raise ConfigError(
                    f"{SECRET_FILE}={path} is no file that its owner alone may read: chmod 600"
                )
            return file.read(MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE}={path}: {error.strerror}") from None


def address_of_leader() -> str:
    """The address at which other hosts find rank 0."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def listen_as_leader(port: int) -> socket.socket:
    """A socket of rank 0 that listens at its own address, and at no other one.

    Args:
        port: 0 for any.

    Raises:
        ConfigError: that is no address of this host, or somebody else has the port.
    """
    name = BIND if os.environ.get(BIND) else "MASTER_ADDR"
    address = os.environ.get(BIND) or address_of_leader()
    try:
        return listen_at(address, port)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at {name}={address}, port {port}: {error.strerror}; set {BIND} "
            "to an address of its own host"
        ) from None
