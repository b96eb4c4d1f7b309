"""One replica: an engine process, and its place among the others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import Any, Protocol

import msgspec

from megatron_async.config.kv_events import kv_events_config
from megatron_async.errors import (
    EngineDeadError,
    EngineGivenUpError,
    EngineStalledError,
    MegatronAsyncError,
)
from megatron_async.processes.messages import NotStarted
from megatron_async.replicas.roster import Member
from megatron_async.serving.engine_side.stall_watch import STALL_SECONDS
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.messages import Control, Endpoint, Kept, Launch
from megatron_async.serving.supervisor import Supervisor

logger = logging.getLogger(__name__)

ROSTER_SECONDS = 2.0
"""For a roster to hear that a replica goes."""
LEAVE_SECONDS = 5.0
"""For the engine to end requests whose time is over."""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What each replica serves, and how.

    Args:
        model: a model directory, or ``"tiny"``.
        config: the fields of an ``EngineConfig``.
        max_queue: sequences that may wait at each beyond those that run; None for any number.
        max_restarts: times within ten minutes that an engine process is started again before the
            replica is replaced.
        shutdown_timeout: seconds that requests have to end when a replica goes.
        stall_seconds: see ``StallWatch``; a replica whose requests stall is replaced.
        across_hosts: front ends may be on other hosts: over TCP, encrypted, in place of Unix
            sockets.
    """

    model: str
    config: dict[str, Any]
    max_queue: int | None = None
    max_restarts: int = 3
    shutdown_timeout: float = 30.0
    stall_seconds: float = STALL_SECONDS
    across_hosts: bool = False

    def config_of(self, rank: int) -> dict[str, Any]:
        """The engine's fields of one replica: each has KV events at addresses of its own.

        Raises:
            ConfigError: the KV events cannot be published as asked.
        """
        events = kv_events_config(self.config.get("kv_events_config"))
        if events is None:
            return dict(self.config)
        return {**self.config, "kv_events_config": dataclasses.asdict(events.of_rank(rank))}


class Registrar(Protocol):
    """What a replica needs of the ``Roster``, wherever that is."""

    async def kept(self) -> Kept:
        """What a new replica must know."""

    async def join(self, member: Member, kept: Kept) -> bool:
        """See ``Roster.join``."""

    async def standing(self, name: str) -> str:
        """See ``Roster.standing``."""

    async def leave(self, name: str) -> None:
        """See ``Roster.leave``."""

    async def fail(self, failure: NotStarted) -> None:
        """See ``Roster.fail``."""


class EngineReplica:
    """An engine process, which is started again when it dies, and joins a roster.

    Args:
        name: that no other replica has.
        host: the address at which other hosts find this one.
        rank: of those that run, which tells the addresses of their KV events apart.

    Raises:
        ConfigError: the KV events cannot be published as asked.
    """

    def __init__(
        self,
        name: str,
        settings: ReplicaSettings,
        registrar: Registrar,
        *,
        host: str,
        rank: int = 0,
    ) -> None:
        self.name = name
        self._settings = settings
        self._config = settings.config_of(rank)
        self._registrar = registrar
        self._host = host
        self._supervisor: Supervisor | None = None
        self._client: EngineClient | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine process, with what the others were told, and join them.

        Raises:
            MegatronAsyncError: it cannot serve what it is asked to; the roster knows why.
        """
        try:
            while True:
                endpoint = await self._begin(await self._registrar.kept())
                kept = (await self._ready_client.info()).kept
                if await self._registrar.join(Member(self.name, endpoint), kept):
                    return
                await self._end()  # there are new weights since it began
        except MegatronAsyncError as error:
            await self._end()
            await self._registrar.fail(NotStarted.because(error))
            raise

    async def check(self) -> None:
        """Raises EngineDeadError when another replica should take the place of this one. A roster
        that has forgotten it is told of it again."""
        supervisor, client = self._supervisor, self._ready_client
        if supervisor is None or supervisor.gave_up:
            raise EngineGivenUpError("the engine process has died too often")
        if client.snapshot is not None and client.snapshot.stalled is not None:
            raise EngineStalledError(client.snapshot.stalled)
        standing = await self._registrar.standing(self.name)
        if standing == "expelled":
            raise EngineDeadError("this replica is not what the others are")
        if standing == "unknown" and client.state == "ready":
            member = Member(self.name, client.endpoint)
            if not await self._registrar.join(member, (await client.info()).kept):
                raise EngineDeadError("this replica has missed new weights")

    def stats(self) -> dict[str, float]:
        """How much it has to do: ``requests`` that run or wait."""
        snapshot = None if self._client is None else self._client.snapshot
        if snapshot is None:
            return {"requests": 0.0}
        gauges = snapshot.gauges
        return {"requests": float(gauges["requests_running"] + gauges["requests_waiting"])}

    async def leave(self) -> None:
        """Take no more requests, let those that run end, and end."""
        with contextlib.suppress(Exception):  # the roster may go at the same time
            async with asyncio.timeout(ROSTER_SECONDS):
                await self._registrar.leave(self.name)
        seconds = self._settings.shutdown_timeout
        if self._client is not None and self._client.state == "ready":
            drain = Control(0, "drain", {"timeout": seconds})
            with contextlib.suppress(MegatronAsyncError, TimeoutError):
                async with asyncio.timeout(seconds + LEAVE_SECONDS):
                    await self._client.command(drain)
        await self._end()

    @property
    def _ready_client(self) -> EngineClient:
        assert self._client is not None, "start has not been called"
        return self._client

    async def _begin(self, kept: Kept) -> Endpoint:
        settings = self._settings
        if settings.across_hosts:
            endpoint = Endpoint.over_network(self._host)
        else:
            endpoint = Endpoint.private()
        launch = Launch(
            settings.model,
            self._config,
            endpoint,
            settings.max_queue,
            kept=kept,
            stall_seconds=settings.stall_seconds,
        )
        self._supervisor = Supervisor(launch, max_restarts=settings.max_restarts)
        self._client = EngineClient(endpoint)
        await self._supervisor.start()
        watched = self._give_up(self._supervisor, self._client)
        self._watching = asyncio.create_task(watched, name="engine of a replica")
        await self._client.connect()
        await self._client.ready()
        return endpoint

    async def _give_up(self, supervisor: Supervisor, client: EngineClient) -> None:
        """Tell the waiters for an engine that it is not started again."""
        client.give_up(await supervisor.given_up())

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._client is not None:
            await self._client.aclose()
        if self._supervisor is not None:
            await self._supervisor.stop()
