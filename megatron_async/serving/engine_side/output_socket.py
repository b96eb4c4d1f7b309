"""The socket through which front ends get what they are sent. It never blocks."""

from __future__ import annotations

import threading

import zmq

from megatron_async.serving.messages import FROM_ENGINE, Endpoint, FromEngine

HIGH_WATER_MARK = 4096
"""Messages on their way to one front end; it is dropped when it leaves more unread. At a step each
millisecond that is four seconds, and the front end's own socket holds as many again."""


class OutputSocket:
    """A ROUTER that sends from any thread.

    A socket may change threads under a full memory fence (zeromq's guide, "Multithreading"), which
    the lock is. Nobody polls it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        self._lock = threading.RLock()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a front end is not there
        self._socket.setsockopt(zmq.LINGER, 200)
        endpoint.serve(self._socket, endpoint.outputs)

    def send(self, identity: bytes, message: FromEngine) -> bool:
        """False when the front end is not there, or does not read."""
        frames = (identity, FROM_ENGINE.encode(message))
        try:
            with self._lock:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """What is under way gets a moment to arrive."""
        with self._lock:
            self._socket.close()
