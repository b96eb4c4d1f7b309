"""The sockets of the engine process: what front ends send, and what they are sent."""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import socket
import time
from collections.abc import Iterator

import zmq

from megatron_async.serving.engine_side.output_socket import OutputSocket
from megatron_async.serving.messages import TO_ENGINE, Endpoint, ToEngine

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 256
"""Taken from the socket before deadlines are looked at again."""


class Sockets:
    """Belong to the main thread, but for :attr:`outputs` and :meth:`wake`.

    Attributes:
        outputs: sends to front ends, from any thread.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._secret = endpoint.secret
        self._context = zmq.Context()
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self.outputs = OutputSocket(self._context, endpoint)
        self._commands = self._context.socket(zmq.ROUTER)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.setsockopt(zmq.RCVHWM, 0)
        endpoint.serve(self._commands, endpoint.commands)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)

    def wait(self, until: float) -> bool:
        """Whether something has come by a time of ``time.monotonic``."""
        came = bool(self._poller.poll(math.ceil(max(0.0, until - time.monotonic()) * 1000)))
        # A wake may have come behind the poll, while another thread had Python's lock.
        with contextlib.suppress(BlockingIOError):
            came |= bool(self._wakes.recv(MESSAGES_AT_ONCE))
        return came

    def wake(self) -> None:
        """End a :meth:`wait`, from any thread."""
        with contextlib.suppress(OSError):  # it has ended, or will look around in any case
            self._wake.send(b".")

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        """Messages with the identities of their front ends: all that has come, or some of it."""
        for _ in range(MESSAGES_AT_ONCE):
            try:
                identity, *frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            secret = self._secret
            if len(frames) != 1 or not hmac.compare_digest(identity[: len(secret)], secret):
                continue
            try:
                message = TO_ENGINE.decode(frames[0])
            except ValueError as error:
                logger.warning("a message was not understood: %s", error)
                continue
            yield identity, message

    def hang_up(self) -> None:
        """Hear nothing more."""
        self._commands.close()

    def close(self) -> None:
        """What is under way to front ends gets a moment to arrive."""
        self.outputs.close()
        self._wakes.close()
        self._wake.close()
        self._context.term()
