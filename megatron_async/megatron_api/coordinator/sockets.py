"""A ZMQ socket with a thread of its own, which alone may touch it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import socket as os_sockets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_async.codec import parse_msgpack
from megatron_async.errors import ConfigError

LINGER_MS = 1000
"""How long the last messages may take to leave a socket that is closed."""

logger = logging.getLogger(__name__)


def zmq_module() -> Any:
    """pyzmq; raises :class:`ConfigError` where it is not installed."""
    try:
        import zmq
    except ImportError:
        raise ConfigError(
            "the coordinator and its client need pyzmq; install megatron-async[server]"
        ) from None
    return zmq


def read_message(data: bytes) -> list[Any] | None:
    """A list with something in it; None for anything else that came."""
    with contextlib.suppress(ValueError):
        message = parse_msgpack(data)
        if isinstance(message, list) and message:
            return message
    return None


class SocketThread:
    """Takes what comes over a socket, and sends what others ask it to.

    Args:
        kind: ``"ROUTER"`` or ``"DEALER"``.
        on_frames: called in the thread with each message that comes, as frames.
        bind_or_connect: called with the socket before the thread starts.
    """

    def __init__(
        self,
        kind: str,
        on_frames: Callable[[list[bytes]], None],
        bind_or_connect: Callable[[Any], None],
        name: str,
    ) -> None:
        self._zmq = zmq_module()
        self._on_frames = on_frames
        self._context = self._zmq.Context()
        self._socket = self._context.socket(getattr(self._zmq, kind))
        self._socket.setsockopt(self._zmq.LINGER, LINGER_MS)
        for option in (self._zmq.SNDHWM, self._zmq.RCVHWM):  # nothing is dropped
            self._socket.setsockopt(option, 0)
        try:
            bind_or_connect(self._socket)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakes, self._woken = os_sockets.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._calls: deque[Callable[[], object]] = deque()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        atexit.register(self.close)

    def start(self) -> None:
        """Begin to take messages."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """It takes messages."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """The caller runs in this thread."""
        return threading.current_thread() is self._thread

    def call(self, what: Callable[[], object]) -> None:
        """Do something in the thread, from any other; after its end nothing is done."""
        self._calls.append(what)
        self._wake()

    def send(self, *frames: bytes) -> None:
        """Send a message; in the thread alone."""
        with contextlib.suppress(self._zmq.ZMQError):  # the other side has gone
            self._socket.send_multipart(frames)

    def end(self) -> None:
        """End the thread after what it does now; from any thread, without a wait."""
        self._ending = True
        self._wake()

    def close(self) -> None:
        """End the thread and wait for it, unless the caller runs in it."""
        atexit.unregister(self.close)
        self.end()
        if not self._thread.ident:
            self._release()
        elif not self.is_current:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is woken already, or has ended
            self._wakes.send(b"\0")

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._woken, self._zmq.POLLIN)
        try:
            while not self._ending:
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
                while self._calls:
                    self._guarded(self._calls.popleft())
                while not self._ending and (frames := self._next()) is not None:
                    self._guarded(functools.partial(self._on_frames, frames))
            while self._calls:
                self._guarded(self._calls.popleft())
        finally:
            self._release()

    def _next(self) -> list[bytes] | None:
        try:
            frames: list[bytes] = self._socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames

    def _guarded(self, what: Callable[[], object]) -> None:
        """One message that cannot be served does not end the thread."""
        try:
            what()
        except Exception:
            logger.exception("a message of an inference client was not served")

    def _release(self) -> None:
        self._socket.close()
        self._wakes.close()
        self._woken.close()
        self._context.term()
