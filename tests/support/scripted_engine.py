"""The engine process's sockets, with nothing behind them but what a test says."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import zmq

from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.engine_link import Link
from megatron_async.serving.messages import Endpoint, EngineInfo, Hello, Snapshot, ToEngine
from tests.support.patience import PATIENCE_SECONDS

MILLISECONDS = int(PATIENCE_SECONDS * 1000)
INFO = EngineInfo("scripted", 256, 256, [], "float32", 1, 4, 64, "0")
GAUGES = {"requests_running": 0, "requests_waiting": 0, "weight_version": 0}


def snapshot(stalled: str | None = None) -> Snapshot:
    """Of an engine that has done nothing."""
    return Snapshot(0.0, {}, dict(GAUGES), stalled)


class ScriptedEngine:
    """Hears all that front ends say, and says what it is told to."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self.commands, self.outputs = (self._context.socket(zmq.ROUTER) for _ in range(2))
        for opened, address in (
            (self.commands, endpoint.commands),
            (self.outputs, endpoint.outputs),
        ):
            opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
            opened.setsockopt(zmq.LINGER, MILLISECONDS)
            opened.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
            opened.bind(address)

    async def hear(self) -> tuple[bytes, ToEngine]:
        """Who says something, and what."""
        identity, frame = await asyncio.to_thread(self.commands.recv_multipart)
        return identity, msgspec.msgpack.decode(frame, type=ToEngine)

    async def hear_after_hello(self) -> tuple[bytes, ToEngine]:
        """What is said next that is no greeting."""
        while True:
            identity, message = await self.hear()
            if not isinstance(message, Hello):
                return identity, message

    async def greeted(self, client: EngineClient) -> bytes:
        """Wait until ``client`` says hello and can be answered; who it is now."""
        while True:
            identity, message = await self.hear()
            mine = client._link and client._link._outputs.getsockopt(zmq.ROUTING_ID)
            if isinstance(message, Hello) and identity == mine:
                with contextlib.suppress(zmq.ZMQError):  # the other connection is not there yet
                    self.say(identity, snapshot())
                    return identity

    def say(self, identity: bytes, *messages: Any) -> None:
        """Messages to a front end; bytes as they are."""
        for message in messages:
            frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
            self.outputs.send_multipart((identity, frame))

    async def meet(self, client: EngineClient) -> bytes:
        """Answer the greeting of ``client``; who it is."""
        identity = await self.greeted(client)
        self.say(identity, INFO)
        await client.ready()
        return identity

    def close(self) -> None:
        """As a process that ends: what was said arrives."""
        self.commands.close()
        self.outputs.close()


def link_of(client: EngineClient) -> Link:
    """Its connection now."""
    assert client._link is not None
    return client._link
