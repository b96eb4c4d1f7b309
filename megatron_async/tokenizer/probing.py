"""A ``tokenizer.json`` is tried in a process with limits before it is loaded in this one: it may be
anybody's, and its rules can multiply a text."""

from __future__ import annotations

import hashlib
import signal
import socket
from pathlib import Path

from megatron_async.errors import CheckpointError
from megatron_async.processes.child import Child

PROBE = "megatron_async.tokenizer.probe"
"""The module that the process runs, and this one has no use for."""
MOST_SECONDS = 600.0
"""For a process that somebody has stopped: its own limit is of what it computes."""
MOST_ANSWER = 2**16
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}

_good: set[bytes] = set()
"""Hashes of files that have been tried."""


def check_tokenizer(file: Path, data: bytes) -> None:
    """Check the content ``data`` of a ``tokenizer.json``, once for each content.

    Raises:
        CheckpointError: it is broken, or takes too much time or memory.
    """
    digest = hashlib.sha256(data).digest()
    if digest in _good:
        return
    said = _ask(file, data)
    if said:
        raise CheckpointError(f"{file}: not a valid tokenizer file: {said}")
    _good.add(digest)


def _ask(file: Path, data: bytes) -> str:
    """What the process says."""
    try:
        child = Child(PROBE, environment=_ENVIRONMENT)
    except OSError as error:
        said = f"the process that tries it cannot be started: {error.strerror}"
        raise CheckpointError(f"{file}: {said}") from None
    try:
        with child.connection as connection:
            connection.settimeout(MOST_SECONDS)
            found = _answer(connection, data)
        if not found.endswith(b"\n"):
            return _how_it_ended(child)
        return found.decode("utf-8", "replace").strip()
    except TimeoutError:
        return f"a process that tries it has not ended within {MOST_SECONDS:.0f} s"
    finally:
        child.kill()
        child.wait()
        child.lifeline.close()


def _answer(connection: socket.socket, data: bytes) -> bytes:
    """All that comes back; nothing where the process is gone."""
    try:
        connection.sendall(len(data).to_bytes(8, "big") + data)
        return connection.makefile("rb").readline(MOST_ANSWER)
    except ConnectionError:
        return b""


def _how_it_ended(child: Child) -> str:
    status = child.wait()
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return "it takes too much time: its rules never come to an end, or multiply a text"
    return "it takes too much memory: its rules or its numbers are too large, or multiply a text"
