"""A front end in a process of its own: ``python -m
megatron_async.serving.front_end.front_end_process FD``.

``FD`` is a connection to the parent, which owns the supervisor and the listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence

from megatron_async.processes.messages import Started
from megatron_async.processes.parent import Parent
from megatron_async.processes.watching.beating import BEAT_SECONDS
from megatron_async.serving.front_end.build import build_frontend
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.front_ends import FrontEndLaunch, ToFrontEnd
from megatron_async.serving.http.http_server import run, serve
from megatron_async.serving.http.logs import log_as_json
from megatron_async.serving.messages import GivenUp
from megatron_async.serving.tracing.provider import make_provider


class EngineOfParent:
    """The engine, which the parent starts and stops."""

    def __init__(self, parent: Parent[ToFrontEnd], client: EngineClient) -> None:
        self._parent = parent
        self._client = client
        self._signalled: Callable[[], None] = lambda: None
        self._beating: asyncio.Task[None] | None = None

    def listen(self, signalled: Callable[[], None]) -> None:
        """Call ``signalled`` when the parent says so."""
        self._signalled = signalled

    async def start(self) -> None:
        """Begin to hear the parent."""
        loop = asyncio.get_running_loop()

        def take(said: ToFrontEnd) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, said)

        self._parent.watch(take)
        self._beating = asyncio.create_task(self._beat(), name="signs of life")

    async def given_up(self) -> str:
        """Never: what follows from it is the parent's to decide."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        """It goes on for other front ends."""
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        """Tell the supervisor that the event loop turns: one that stands still serves nobody."""
        while True:
            self._parent.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _take(self, said: ToFrontEnd) -> None:
        if isinstance(said, GivenUp):
            self._client.give_up(said.reason)
        else:
            self._signalled()


def main(arguments: Sequence[str]) -> int:
    """Serve HTTP until the parent says that it is enough; returns the exit status."""
    os.umask(0o077)  # of the files of its metrics
    parent: Parent[ToFrontEnd] = Parent(int(arguments[0]), ToFrontEnd)
    launch = parent.receive()
    assert isinstance(launch, FrontEndLaunch)
    os.set_inheritable(launch.listening, False)
    log_as_json()
    with parent.starting():
        parent.doing("reads the tokenizer")
        front, client = build_frontend(launch.settings)
        tracer_provider = make_provider(launch.settings.otlp_traces_endpoint)
    listening = socket.socket(proto=socket.IPPROTO_TCP, fileno=launch.listening)
    engine = EngineOfParent(parent, client)
    run(
        serve(
            front,
            client,
            engine,
            listening,
            on_ready=lambda: parent.send(Started()),
            listen=engine.listen,
            waits=True,
            tracer_provider=tracer_provider,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
