"""A connection with another rank of this host, for the bytes of tensors, which may be many.

What a socket does not take at once goes on in a thread, so no send waits for the other end's
receive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch

SIZE = struct.Struct("<Q")


class Done:
    """What is over when it is returned, as a ``Work`` of torch.distributed."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        found: Any = torch.futures.Future()
        found.set_result(None)
        return found


class Sent(Done):
    """What a link's thread still sends. The tensor is kept, and must stay as it is until then."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.over = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Link:
    """The connection with one other rank.

    Args:
        name: of the other end, for errors.
        seconds: for the other end to send or receive anything.
    """

    def __init__(self, connection: socket.socket, name: str, seconds: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._name = name
        self._milliseconds = seconds * 1000
        self._lock = threading.Lock()
        self._unsent: deque[Sent] = deque()

    def send(self, data: memoryview) -> Done:
        """Begin to send; what is sent later goes behind.

        Raises:
            RuntimeError: the other end has gone.
        """
        head = memoryview(SIZE.pack(len(data)))
        with self._lock:
            sent = 0 if self._unsent else self._send_some([head, data])
            if sent == len(head) + len(data):
                return Done()
            work = Sent([head[sent:], data[max(0, sent - len(head)) :]])
            self._unsent.append(work)
            if len(self._unsent) == 1:
                threading.Thread(target=self._send_rest, name="sends", daemon=True).start()
            return work

    def receive(self, into: memoryview) -> None:
        """Wait for what the other end sends next, which is of that size.

        Raises:
            RuntimeError: it is not, or the other end has gone.
        """
        head = bytearray(SIZE.size)
        self._fill(memoryview(head))
        (size,) = SIZE.unpack(head)
        if size != len(into):
            raise RuntimeError(f"{self._name} sends {size} bytes where {len(into)} are expected")
        self._fill(into)

    def close(self) -> None:
        """Hang up; a thread that waits at either end gets an error."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _fill(self, into: memoryview) -> None:
        while into:
            try:
                count = self._connection.recv_into(into)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                raise self._broken(error) from None
            if not count:
                raise RuntimeError(f"{self._name} has closed the connection")
            into = into[count:]

    def _send_some(self, parts: list[memoryview]) -> int:
        try:
            return self._connection.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from None

    def _send_rest(self) -> None:
        """Send in a thread, until nothing is left."""
        error: RuntimeError | None = None
        while True:
            work = self._unsent[0]
            try:
                for part in work.parts:
                    while part and error is None:
                        sent = self._send_some([part])
                        part = part[sent:]
                        if not sent:
                            self._wait(select.POLLOUT)
            except RuntimeError as raised:
                error = raised
            work.error = error
            with self._lock:
                self._unsent.popleft()
                is_last = not self._unsent
            work.over.set()
            if is_last:
                return

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        if not poll.poll(self._milliseconds):
            seconds = self._milliseconds / 1000
            raise RuntimeError(f"{self._name} has timed out: nothing for {seconds:g} seconds")

    def _broken(self, error: OSError) -> RuntimeError:
        return RuntimeError(f"the connection to {self._name} is broken: {error}")
