"""Replicas for a server that has its own front end: Ray and its deployments from start to end.

A Ray of this machine alone is for this server alone. Ray itself would listen at all addresses, and
have a directory that all users may change: it listens at the loopback address, wants a token from
every caller, and has a directory of its own, inside of one that this user alone may enter, for Ray
makes its own accessible to everybody.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import psutil
import ray
from ray import serve
from ray._private import ray_constants
from ray._raylet import Config

from megatron_async.errors import ConfigError
from megatron_async.processes.private_folder import disown, make_private, make_private_folder
from megatron_async.replicas.aftermath import Aftermath
from megatron_async.replicas.engine_replica import ReplicaSettings
from megatron_async.replicas.ray_serve import (
    LATE_SECONDS,
    ROSTER,
    Plan,
    RosterHandle,
    engines,
    roster,
)
from megatron_async.replicas.roster import Listing
from megatron_async.serving.messages import Kept

WATCH_SECONDS = 5.0
"""Between two looks whether Ray is still there."""
SILENT_SECONDS = 60.0
"""For Ray to say whether it is still there."""
CONNECT_SECONDS = 5.0
"""For a Ray cluster to accept a connection."""
STOP_SECONDS = 15.0
"""For Ray to end, beyond what its replicas have."""
LONGEST_SOCKET = f"ray/session_2000-01-01_00-00-00_000000_{1 << 22}/sockets/plasma_store"
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RayThread:
    """Ray's own functions block, and may do so for ever. They run one after the other in a thread
    that the process does not wait for. It stays, since Ray's processes end with the thread that has
    started them."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    async def call(self, function: Callable[[], T], seconds: float | None = None) -> T:
        """What ``function`` returns; raises TimeoutError after ``seconds``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(set_it: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_it(value)

        def work() -> None:
            try:
                found = function()
            except BaseException as error:
                done: tuple[Any, Any] = future.set_exception, error
            else:
                done = future.set_result, found
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, *done)

        self._work.put(work)
        async with asyncio.timeout(seconds):
            return await future

    def _run(self) -> None:
        while True:
            self._work.get()()


def _check_address(address: str | None) -> None:
    """Raises OSError where nobody answers: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _stay_on_this_host() -> None:
    """Have a Ray that is started from now on listen at the loopback address, as it does on systems
    where it is for one machine alone, and want a token."""
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for its processes
    ray_constants.ENABLE_RAY_CLUSTER = False
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    Config.initialize("")  # it has read the environment before


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
        self._thread = RayThread()
        self._folder: str | None = None
        self._aftermath: Aftermath | None = None

    async def start(self) -> None:
        """Start Ray and the replicas, and wait until one of them serves.

        Raises:
            MegatronAsyncError: they cannot serve what they are asked to, or Ray cannot be had.
        """
        await self._thread.call(self._connect)
        _take_signals_back()
        await self._thread.call(self._deploy)
        handle = RosterHandle(serve.get_deployment_handle(ROSTER, self._name))
        version = 0
        while True:
            listing = await handle.changed(version)
            if listing.members:
                break
            if listing.failure is not None:
                raise listing.failure.to_error()
            version = listing.version
        self._roster = handle
        self._is_started.set()

    async def given_up(self) -> str:
        """Wait until Ray is not there any more. It replaces replicas for as long as it is."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                status = await self._thread.call(serve.status, SILENT_SECONDS)
            except TimeoutError:
                return f"Ray has not answered for {SILENT_SECONDS:g} seconds"
            except Exception as error:
                return f"Ray has ended: {error}"
            if self._name not in status.applications:
                return "the application was deleted from Ray Serve"

    async def stop(self) -> None:
        """End the replicas, and Ray where this has started it; also one that does not answer."""
        if self._is_connected:
            seconds = self._settings.shutdown_timeout + LATE_SECONDS + STOP_SECONDS
            try:
                await self._thread.call(self._disconnect, seconds)
            except TimeoutError:
                logger.error("Ray does not end within %g seconds and is killed", seconds)
                atexit.unregister(ray.shutdown)  # it would wait again
        if self._aftermath is not None:
            await asyncio.to_thread(self._aftermath.begin)

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

    # --- in Ray's thread ------------------------------------------------------------------------

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if self._address is None:
                self._start_ray(quiet)
            else:
                _check_address(self._address)
                ray.init(self._address, **quiet)
        except ConfigError:
            raise
        except Exception as error:
            said = f"no Ray at {self._address}: {error}"
            if self._aftermath is not None:
                self._aftermath.keep_folder()
                assert self._folder is not None
                disown(self._folder)
                said = f"Ray cannot be started: {error}; its log is in {self._folder}"
            raise ConfigError(said) from None
        self._is_connected = True
        self._check_room()

    def _start_ray(self, options: dict[str, Any]) -> None:
        self._folder = make_private_folder(LONGEST_SOCKET, os.environ.get("RAY_TMPDIR", "/tmp"))
        self._aftermath = Aftermath(self._folder)
        _stay_on_this_host()
        own = psutil.Process()
        others = own.children()
        mask = os.umask(0o077)
        try:
            ray.init(
                "local",
                include_dashboard=False,
                _temp_dir=f"{self._folder}/ray",
                _node_ip_address=LOOPBACK,
                **options,
            )
        finally:
            os.umask(mask)
            for each in own.children():
                if each not in others:
                    self._aftermath.add([each, *each.children(recursive=True)])
        make_private(self._folder)
        logger.info(
            "the log of Ray and of the replicas is in %s/ray/session_latest/logs", self._folder
        )
        if ray.util.get_node_ip_address() != LOOPBACK:
            logger.warning("this version of Ray listens at addresses that others reach")

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
