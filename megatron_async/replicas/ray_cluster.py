"""Replicas for a server that has its own front end: Ray and its deployments from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from typing import Any

import msgspec
import ray
from ray import serve

from megatron_async.errors import ConfigError
from megatron_async.replicas.engine_replica import ReplicaSettings
from megatron_async.replicas.ray_serve import ROSTER, Plan, RosterHandle, engines, roster
from megatron_async.replicas.roster import Listing
from megatron_async.serving.child_process import error_of
from megatron_async.serving.messages import Kept

WATCH_SECONDS = 5.0
"""Between two looks whether Ray is still there."""
CONNECT_SECONDS = 5.0
"""For a Ray cluster to accept a connection."""


def _check_address(address: str | None) -> None:
    """Raises OSError where nobody answers: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _take_signals_back() -> None:
    """Ray's library puts handlers of its own below Python's, which print a trace."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


class RayReplicas:
    """Replicas without an HTTP deployment, from start to end: the ``Engine`` of a server, and the
    ``Directory`` of its ``ReplicasClient``.

    Args:
        address: of a Ray cluster to join; None starts one of this machine, which ends with it.
    """

    def __init__(self, settings: ReplicaSettings, plan: Plan, *, address: str | None) -> None:
        self._settings = settings
        self._plan = plan
        self._address = address
        self._name = f"megatron-async-{secrets.token_hex(4)}"
        self._roster: RosterHandle | None = None
        self._is_started = asyncio.Event()
        self._is_connected = False

    async def start(self) -> None:
        """Start Ray and the replicas, and wait until one of them serves.

        Raises:
            MegatronAsyncError: they cannot serve what they are asked to, or Ray cannot be had.
        """
        await asyncio.to_thread(self._connect)
        _take_signals_back()
        await asyncio.to_thread(self._deploy)
        handle = RosterHandle(serve.get_deployment_handle(ROSTER, self._name))
        version = 0
        while True:
            listing = await handle.changed(version)
            if listing.members:
                break
            if listing.failure is not None:
                raise error_of(listing.failure)
            version = listing.version
        self._roster = handle
        self._is_started.set()

    async def given_up(self) -> str:
        """Wait until Ray is not there any more. It replaces replicas for as long as it is."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                status = await asyncio.to_thread(serve.status)
            except Exception as error:
                return f"Ray has ended: {error}"
            if self._name not in status.applications:
                return "the application was deleted from Ray Serve"

    async def stop(self) -> None:
        """End the replicas, and Ray where this has started it."""
        if self._is_connected:
            await asyncio.to_thread(self._disconnect)

    async def changed(self, version: int) -> Listing:
        """See ``Directory``."""
        return await (await self._known()).changed(version)

    async def keep(self, kept: Kept) -> Listing:
        """See ``Directory``."""
        return await (await self._known()).keep(kept)

    async def expel(self, name: str) -> None:
        """See ``Directory``."""
        await (await self._known()).expel(name)

    async def _known(self) -> RosterHandle:
        await self._is_started.wait()
        assert self._roster is not None
        return self._roster

    # --- in threads: Ray's own functions block --------------------------------------------------

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._address is None:
            options |= {"include_dashboard": False}
        try:
            _check_address(self._address)
            ray.init(self._address or "local", **options)
        except Exception as error:
            said = (
                "Ray cannot be started" if self._address is None else f"no Ray at {self._address}"
            )
            raise ConfigError(f"{said}: {error}") from None
        self._is_connected = True
        self._check_room()

    def _check_room(self) -> None:
        gpus = ray.cluster_resources().get("GPU", 0.0)
        if self._plan.gpus is None:
            is_for_cpu = str(self._settings.config.get("device")).startswith("cpu")
            each = 0.0 if is_for_cpu or not gpus else 1.0
            self._plan = msgspec.structs.replace(self._plan, gpus=each)
        needed = self._plan.replicas * (self._plan.gpus or 0)
        if self._address is None and needed > gpus:
            raise ConfigError(
                f"{self._plan.replicas} replicas need {needed:g} GPUs, and this machine has "
                f"{gpus:g}; lower --replicas or --replica-gpus"
            )

    def _deploy(self) -> None:
        quiet = {"enable_access_log": False, "log_level": "ERROR"}
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        app = engines(self._settings, self._plan, roster())
        target = serve.RunTarget(app, name=self._name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)

    def _disconnect(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone already
            serve.delete(self._name)
        ray.shutdown()
