"""What connects rank 0 with another rank. No torch: it is there before a rank has imported any."""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import socket
import threading
from collections.abc import Callable

from megatron_async.processes.call import MOST_BYTES, Call, listen
from megatron_async.processes.lifeline import EXIT_ORPHAN

WAKE = b"\1"
BEAT = b"\2"
"""A question whether a rank still runs, and its answer."""
LAST = b"\3"
"""Ahead of the reason why rank 0 hangs up, which it says to ranks that live on."""
OVER = b"\4"
"""Rank 0 ends the group, and may go before a rank has read that it ends."""
TAG_BYTES = 16


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Bytes of a socket, with a timeout or not; raises OSError when it is closed before."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has hung up")
        data += more
    return data


class SealedCall(Call):
    """A call over a network: each message has a tag, by a key that both ends alone know and its
    number. What somebody on the way changes, leaves out, repeats or adds ends the call.

    Args:
        sends, receives: keys, one for each direction.
    """

    def __init__(self, handle: int, sends: bytes, receives: bytes) -> None:
        super().__init__(handle)
        self._keys = sends, receives
        self._sent = self._received = 0

    def recv_bytes(self, maxlength: int | None = MOST_BYTES) -> bytes:
        data = super().recv_bytes(maxlength)
        message, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._received, message)):
            self.hang_up()
            raise OSError("a message is not as the other rank has sent it")
        self._received += 1
        return message

    def _sealed(self, data: bytes) -> bytes:
        tag = _tag(self._keys[0], self._sent, data)
        self._sent += 1
        return data + tag


def _tag(key: bytes, number: int, message: bytes) -> bytes:
    content = number.to_bytes(8, "big") + message
    return hmac.digest(key, content, hashlib.sha256)[:TAG_BYTES]


class Line:
    """A follower's end, from its first moment on: a thread answers whether it runs, and ends the
    process with rank 0, for which a collective may wait for ever.

    Args:
        ends_process: without it the process is its user's, and goes on when rank 0 is gone.

    Attributes:
        wakes: set when there is something to read in the ring.
        messages: those that came over the connection.
        lost: why rank 0 is gone; None while it is there.
        failure: why the group has failed, of which rank 0 has told: what it told before is void.
        answer: what is said besides when rank 0 asks whether this rank runs.
        is_over: rank 0 has ended the group. It may go while this process still leaves it, or has
            not come to its last message.
    """

    def __init__(self, call: Call, *, ends_process: bool = True) -> None:
        self.wakes = threading.Event()
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.lost: str | None = None
        self.failure: str | None = None
        self.answer: Callable[[], bytes] | None = None
        self.is_over = False
        self._call = call
        listen(call, self._take, "rank 0", self._end_process if ends_process else self._lose)

    def _end_process(self) -> None:
        os._exit(0 if self.is_over else EXIT_ORPHAN)

    def _lose(self) -> None:
        self.lost = self.failure or "rank 0 of the model is gone"
        self.wakes.set()
        self._call.hang_up()

    def hang_up(self) -> None:
        """Leave the group; rank 0 takes this one for dead unless it has ended the group itself."""
        self._call.shut_down()

    def say(self, data: bytes) -> None:
        """See :class:`Call`."""
        self._call.say(data)

    def _take(self, data: bytes) -> None:
        if data == WAKE:
            self.wakes.set()
        elif data == BEAT:
            self._call.say(BEAT)
            if self.answer is not None:
                self._call.say(self.answer())
        elif data == OVER:
            self.is_over = True
        elif data[:1] == LAST and self.answer is not None:
            self.failure = data[1:].decode(errors="replace")
        else:
            self.messages.put(data)
