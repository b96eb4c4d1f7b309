"""The sockets between a front end and the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_async.serving.messages import FROM_ENGINE, Endpoint, FromEngine

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 64
"""Taken from the socket before the event loop goes on with other things."""
SILENCE_SECONDS = 20.0
"""Without a message after which the engine's process counts as gone. Its supervisor, which is on
its host, is faster; this is for a host that is gone, and for a front end that was dropped."""
HIGH_WATER_MARK = 4096


class Link:
    """The sockets of one connection, under an identity of their own.

    zeromq's descriptors tell of changes only, so all that is there is read before the next wait.

    Args:
        receive: gets what comes.
        broken: called with what has become of the engine process when it is gone: a connection was
            lost, or it said something once and nothing more for :data:`SILENCE_SECONDS`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        receive: Callable[[FromEngine], None],
        broken: Callable[[str], None],
    ) -> None:
        identity = endpoint.secret + os.urandom(8)
        self._receive = receive
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._monitors: list[zmq.Socket[bytes]] = []
        try:
            self._outputs = self._open(identity, endpoint)
            self._outputs.connect(endpoint.outputs)
            self._commands = self._open(identity, endpoint)
            self._commands.connect(endpoint.commands)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._is_open = True
        self._heard: float | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._outputs.FD, self._readable)
        for monitor in self._monitors:
            self._loop.add_reader(monitor.FD, self._changed)
        # A descriptor tells of nothing new before a first look has found nothing.
        self._loop.call_soon(self._readable)
        self._loop.call_soon(self._changed)

    def send(self, frame: bytes) -> bool:
        """False when nobody takes it."""
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger: int) -> None:
        """Nothing more comes; what was sent has ``linger`` milliseconds to leave."""
        if not self._is_open:
            return
        self._is_open = False
        if self._silence is not None:
            self._silence.cancel()
        for each in (self._outputs, *self._monitors):
            self._loop.remove_reader(each.FD)
        for each in (self._outputs, self._commands):
            each.disable_monitor()
        for each in (*self._monitors, self._outputs, self._commands):
            each.close(linger)
        self._context.term()

    def _open(self, identity: bytes, endpoint: Endpoint) -> zmq.Socket[bytes]:
        opened = self._context.socket(zmq.DEALER)
        endpoint.secure(opened, serves=False)
        opened.setsockopt(zmq.ROUTING_ID, identity)
        opened.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a process that is not there
        opened.setsockopt(zmq.RECONNECT_IVL, 20)
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._monitors.append(opened.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        return opened

    def _readable(self) -> None:
        if self._take():
            self._loop.call_soon(self._readable)

    def _take(self) -> bool:
        """Hand out what has come; False when all was."""
        for _ in range(MESSAGES_AT_ONCE):
            if not self._is_open:
                return False
            try:
                frame = self._outputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._hear()
            try:
                self._receive(FROM_ENGINE.decode(frame))
            except Exception:  # what is behind it would lie there without a sign
                logger.exception("a message of the engine was not understood")
                self._broken("has said what this front end does not understand")
                return False
        return True

    def _changed(self) -> None:
        for monitor in self._monitors:
            if not self._is_open:
                return
            with contextlib.suppress(zmq.Again):
                recv_monitor_message(monitor, zmq.NOBLOCK)
                while self._take():
                    """What it has said before."""
                self._broken("has died")

    # --- silence ------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Each message is a sign of life; there are snapshots at least."""
        if self._heard is None:
            self._silence = self._loop.call_later(SILENCE_SECONDS, self._listen)
        self._heard = self._loop.time()

    def _listen(self) -> None:
        """Has there been a sign of life? This process may be the one that stood still, so what has
        come meanwhile is read first."""
        self._readable()
        if not self._is_open or self._heard is None:
            return
        left = self._heard + SILENCE_SECONDS - self._loop.time()
        if left > 0:
            self._silence = self._loop.call_later(left, self._listen)
        else:
            self._broken("gives no sign of life")
