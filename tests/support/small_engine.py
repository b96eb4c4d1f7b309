"""A small engine of hashes behind the sockets of an engine process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.messages import Endpoint, FromEngine, Hello
from tests.support.engines import hash_engine
from tests.support.served_engine import client_of, engine_in_thread

LONG = {"num_tokens_to_generate": 200, "termination_id": -1, "temperature": 0.0}


def small_engine(depth: int = 1, **values: Any) -> DynamicInferenceEngine:
    """A hash engine whose requests may have 256 tokens, four at the same time."""
    values = {"max_requests": 4, "block_size_tokens": 4, "block_count": 300, **values}
    return hash_engine(depth, **values)


def served(engine: DynamicInferenceEngine, **options: Any) -> Any:
    """A client of an engine in a thread."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[EngineClient]:
        with engine_in_thread(engine, **options) as endpoint:
            async with client_of(endpoint) as client:
                yield client

    return opened()


class RawFrontEnd:
    """A front end that reads when it is told to."""

    def __init__(self, endpoint: Endpoint, identity: bytes | None = None) -> None:
        self._context = zmq.Context()
        self.outputs, self.commands = (self._context.socket(zmq.DEALER) for _ in range(2))
        for socket in (self.outputs, self.commands):
            socket.setsockopt(zmq.ROUTING_ID, identity or endpoint.secret + b"raw")
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.outputs.connect(endpoint.outputs)
        self.commands.connect(endpoint.commands)

    def send(self, message: Any) -> None:
        self.commands.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        return msgspec.msgpack.decode(self.outputs.recv(), type=FromEngine)

    def greet(self) -> None:
        """Until the engine answers."""
        self.outputs.setsockopt(zmq.RCVTIMEO, 50)
        while True:
            self.send(Hello())
            with contextlib.suppress(zmq.Again):
                self.receive()
                break
        self.outputs.setsockopt(zmq.RCVTIMEO, 60_000)

    def close(self) -> None:
        self._context.destroy(linger=0)
