"""What an engine and the process that makes its tables say to each other: messages as msgpack, each
behind its length, behind the first the content of a ``tokenizer.json``, and behind an answer with a
table the bytes of its arrays. What is long is sent and received without the GIL."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_async.codec import Codec, encode
from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.step.extras import MOST_FORCED

LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""A peer that says that more will come is not believed."""


class Setup(msgspec.Struct, frozen=True):
    """Tables are wanted for the vocabulary of a model; ``budget``: bytes that a table may take.
    The tokenizer follows."""

    vocab_size: int
    budget: int


class Ready(msgspec.Struct, frozen=True):
    """The process can make tables. ``digest``: ``GrammarCompiler.digest`` of its tokens."""

    digest: bytes


class Ask(msgspec.Struct, frozen=True):
    """A table is wanted; ``spec``: what ``StructuredOutputs.to_dict`` gives."""

    spec: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """A table of ``states``, with masks of ``words``; or the reason that there is none, and what
    has failed, if something has."""

    states: int = 0
    words: int = 0
    reason: str | None = None
    failure: str | None = None


SETUP: Codec[Setup] = Codec(Setup)
READY: Codec[Ready] = Codec(Ready)
ASK: Codec[Ask] = Codec(Ask)
ANSWER: Codec[Answer] = Codec(Answer)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; raises OSError."""
    send_bytes(connection, encode(message))


def send_bytes(connection: socket.socket, data: bytes) -> None:
    """Send bytes behind their length; raises OSError."""
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big"))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytes:
    """The next bytes of :func:`send_bytes`; raises EOFError when there will be none, or OSError."""
    length = bytearray(LENGTH_BYTES)
    _fill(connection, memoryview(length))
    size = int.from_bytes(length, "big")
    if size > MOST_BYTES:
        raise EOFError(f"a message of {size} bytes")
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def send_table(connection: socket.socket, table: TokenAutomaton) -> None:
    """Answer with a table; raises OSError."""
    send(connection, Answer(*table.text.shape))
    for array in _arrays(table):
        connection.sendall(np.ascontiguousarray(array).view(np.uint8).data)


def receive_table(connection: socket.socket, answer: Answer) -> TokenAutomaton:
    """The table behind an answer. Its arrays are filled without the GIL.

    Raises:
        EOFError, OSError: it does not come.
        ValueError: its sizes are none.
    """
    states, words = answer.states, answer.words
    if not (0 < states < 1 << 15 and 0 < words < 1 << 20):
        raise ValueError(f"a table of {states} states and {words} words")
    table = TokenAutomaton(
        np.empty((states, 256), np.int16),
        np.empty(states, np.bool_),
        np.empty((states, words), np.int32),
        np.empty((states, MOST_FORCED), np.int32),
    )
    for array in _arrays(table):
        _fill(connection, array.view(np.uint8).data.cast("B"))
    return table


def _arrays(table: TokenAutomaton) -> tuple[npt.NDArray[Any], ...]:
    return table.transitions, table.accepting, table.text, table.forced


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other process has gone")
        view = view[count:]
