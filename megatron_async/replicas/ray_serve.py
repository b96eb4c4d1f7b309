"""Replicas as deployments of Ray Serve: one of engines, one of their roster, one that serves HTTP.

Ray starts, watches, replaces and scales the replicas. A request does not pass through Ray: the
front end chooses a replica and talks to its engine process by ZeroMQ, as in a server with one
engine. A call through a handle of Ray costs a hundred times as much as that for each token.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Callable
from typing import Any

import grpc.aio
import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from megatron_async.errors import ConfigError
from megatron_async.processes.messages import NotStarted
from megatron_async.replicas.client import DEFAULT_RETRIES, ReplicasClient
from megatron_async.replicas.engine_replica import EngineReplica, ReplicaSettings
from megatron_async.replicas.metrics import ReplicasCollector
from megatron_async.replicas.roster import Listing, Member, Roster
from megatron_async.replicas.routing import DEFAULT_MOST_EXTRA, PrefixRouter
from megatron_async.serving.front_end.build import FrontendSettings, frontend_over
from megatron_async.serving.http.app import make_app
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.http_server import connected
from megatron_async.serving.messages import Kept
from megatron_async.serving.tracing.provider import make_provider

logger = logging.getLogger(__name__)

ROSTER = "Roster"
ENGINE = "Engine"
FRONT_END = "FrontEnd"
LISTING_SECONDS = 5.0
"""For which the roster waits for a change before it answers."""
HEALTH_SECONDS = 2.0
WATCH_SECONDS = 5.0
"""Between two looks whether Ray is still there."""
LOOK_BACK_SECONDS = 12.0
"""Over which the load is averaged for autoscaling; Ray gathers it every ten."""
CONNECT_SECONDS = 5.0
"""For a Ray cluster to accept a connection."""
MOST_CALLS = 100_000
"""Calls of the roster at the same time: each front end always waits for it."""
LATE_SECONDS = 15.0
"""For a replica to go, beyond what its requests have."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there are, what each needs, and which gets a request.

    Args:
        replicas: that are started; with ``max_replicas`` the fewest.
        max_replicas: the most, started as requests queue up; None for always as many.
        target_requests: sequences that run or wait at each replica, on average, that
            autoscaling aims at.
        upscale_seconds, downscale_seconds: for which more or fewer replicas must be wanted before
            there are.
        gpus, cpus: of a replica, as Ray counts them; None for one GPU where ``RayReplicas`` finds
            any and the model is not for a CPU, else none.
        retries: see ``ReplicasClient``.
        most_extra: see ``PrefixRouter``.

    Raises:
        ConfigError: a value is out of range.
    """

    replicas: int = 1
    max_replicas: int | None = None
    target_requests: float = 32.0
    upscale_seconds: float = 5.0
    downscale_seconds: float = 300.0
    gpus: float | None = None
    cpus: float = 0.0
    retries: int = DEFAULT_RETRIES
    most_extra: int = DEFAULT_MOST_EXTRA

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas={self.max_replicas} must be at least replicas={self.replicas}"
            )
        if not self.target_requests > 0:
            raise ConfigError(f"target_requests={self.target_requests} must be above 0")
        seconds = ("upscale_seconds", "downscale_seconds")
        for name in ("gpus", "cpus", "retries", "most_extra", *seconds):
            if not (getattr(self, name) or 0) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0")


# --- deployments ------------------------------------------------------------------------------


def _listen_where_the_node_does() -> None:
    """Have a replica's server of calls listen at the loopback address where Ray does. Called before
    it begins: Ray Serve has it listen at all addresses, wherever the rest of Ray listens."""
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    server: Any = type(grpc.aio.server())
    for name in ("add_insecure_port", "add_secure_port"):
        setattr(server, name, _on_loopback(getattr(server, name)))


def _on_loopback(add_port: Callable[..., int]) -> Callable[..., int]:
    def add(server: Any, address: str, *others: Any) -> int:
        return add_port(server, address.replace("[::]:", "127.0.0.1:"), *others)

    return add


class RosterDeployment:
    """The ``Roster``, which all others call."""

    def __init__(self) -> None:
        _listen_where_the_node_does()
        self._roster = Roster()

    async def changed(self, version: int, seconds: float) -> Listing:
        """See ``Roster.changed``."""
        return await self._roster.changed(version, seconds)

    async def call(self, name: str, *arguments: Any) -> Any:
        """A method of the roster."""
        return getattr(self._roster, name)(*arguments)


class RosterHandle:
    """The roster, for replicas and front ends."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def changed(self, version: int) -> Listing:
        """See ``Directory``."""
        listing: Listing = await self._handle.changed.remote(version, LISTING_SECONDS)
        return listing

    async def keep(self, kept: Kept) -> Listing:
        """See ``Directory``."""
        listing: Listing = await self._call("keep", kept)
        return listing

    async def expel(self, name: str) -> None:
        """See ``Directory``."""
        await self._call("expel", name)

    async def kept(self) -> Kept:
        """See ``Registrar``."""
        listing: Listing = await self._call("listing")
        return listing.kept

    async def join(self, member: Member, kept: Kept) -> bool:
        """See ``Registrar``."""
        return bool(await self._call("join", member, kept))

    async def standing(self, name: str) -> str:
        """See ``Registrar``."""
        return str(await self._call("standing", name))

    async def leave(self, name: str) -> None:
        """See ``Registrar``."""
        await self._call("leave", name)

    async def fail(self, failure: NotStarted) -> None:
        """See ``Registrar``."""
        await self._call("fail", failure)

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._handle.call.remote(name, *arguments)


class EngineDeployment:
    """A replica. Ray asks how it is, how much it has to do, and tells it to go."""

    async def __init__(self, settings: ReplicaSettings, roster: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        _listen_where_the_node_does()
        context = serve.get_replica_context()
        self._replica = EngineReplica(
            context.replica_id.unique_id,
            settings,
            RosterHandle(roster),
            host=ray.util.get_node_ip_address(),
            rank=context.rank.rank,
        )
        await self._replica.start()

    async def check_health(self) -> None:
        """Raises why the replica is to be replaced."""
        await self._replica.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """See ``EngineReplica.stats``."""
        return self._replica.stats()

    async def __del__(self) -> None:
        await self._replica.leave()


class FrontEndDeployment:
    """The server's own FastAPI application, behind Ray's proxy.

    Args:
        engines: are not called: as an argument they are part of the application.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        plan: Plan,
        roster: DeploymentHandle[Any],
        engines: DeploymentHandle[Any],
    ) -> None:
        front, client = frontend_of_replicas(settings, plan, RosterHandle(roster))
        provider = make_provider(settings.otlp_traces_endpoint)
        lifespan = connected(client, waits=True, tracer_provider=provider)
        self._app = make_app(front, lifespan=lifespan, tracer_provider=provider)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def scale(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas for what runs and waits, at ``target_ongoing_requests`` for each."""
    each = (ctx.aggregated_metrics or {}).get("requests", {})
    assert ctx.config is not None
    return math.ceil(sum(each.values()) / ctx.config.get_target_ongoing_requests()), {}


# --- applications -----------------------------------------------------------------------------


def engines(settings: ReplicaSettings, plan: Plan, roster: Application) -> Application:
    """The deployment of engines, for an application that has a :func:`roster`.

    Raises:
        ConfigError: there are too few ports for the KV events of all.
    """
    settings.config_of((plan.max_replicas or plan.replicas) - 1)
    options: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=plan.replicas,
            initial_replicas=plan.replicas,
            max_replicas=plan.max_replicas,
            target_ongoing_requests=plan.target_requests,
            upscale_delay_s=plan.upscale_seconds,
            downscale_delay_s=plan.downscale_seconds,
            look_back_period_s=LOOK_BACK_SECONDS,
            policy=AutoscalingPolicy(policy_function=scale),
        )
        options = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        name=ENGINE,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus or 0},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.shutdown_timeout + LATE_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        **options,
    )(EngineDeployment)
    return deployment.bind(settings, roster)


def roster() -> Application:
    """The deployment of the roster."""
    deployment = serve.deployment(
        name=ROSTER,
        num_replicas=1,
        max_ongoing_requests=MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
    )(RosterDeployment)
    return deployment.bind()


def application(
    settings: ReplicaSettings,
    front: FrontendSettings,
    plan: Plan | None = None,
    *,
    front_ends: int = 1,
) -> Application:
    """All of a server, to be run by ``serve.run``, or mounted in an application of one's own.

    Args:
        front: what the HTTP server serves; its ``endpoint`` is None.
        front_ends: replicas of the deployment that serves HTTP.
    """
    plan = Plan() if plan is None else plan
    known = roster()
    deployment = serve.deployment(
        name=FRONT_END,
        num_replicas=front_ends,
        max_ongoing_requests=MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(FrontEndDeployment))
    return deployment.bind(front, plan, known, engines(settings, plan, known))


def frontend_of_replicas(
    settings: FrontendSettings, plan: Plan, directory: Any
) -> tuple[Frontend, ReplicasClient]:
    """A front end and its way to the replicas of a ``Directory``; raises as ``build_frontend``."""
    router = PrefixRouter(most_extra=plan.most_extra)
    client = ReplicasClient(directory, retries=plan.retries, router=router)
    values = ReplicasCollector(settings.config.model_names[0], client)
    return frontend_over(client, values, settings), client
