"""``megatron-async serve --replicas N``: several engines behind one server."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from typing import TYPE_CHECKING

from megatron_async.cli.options import options
from megatron_async.cli.options.values import integer, number
from megatron_async.errors import ConfigError

if TYPE_CHECKING:
    from megatron_async.config.engine_config import EngineConfig
    from megatron_async.serving.front_end.build import FrontendSettings

MAX_REPLICAS = 4096
DEFAULTS = {
    "max_replicas": None,
    "replica_target_requests": None,
    "replica_retries": 1,
    "replica_gpus": None,
    "replica_most_extra": 8,
    "ray_address": None,
}
"""Defaults of the options that do nothing without ``--replicas``."""


def add_replica_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several engines."""
    add = parser.add_argument_group("replicas").add_argument
    count = integer(1, MAX_REPLICAS)
    said = "run N engines by Ray Serve behind this server (default: one engine without Ray)"
    add("--replicas", type=count, metavar="N", help=said)
    said = "start up to N as requests queue up, and end them again (default: always --replicas)"
    add("--max-replicas", type=count, metavar="N", help=said)
    said = "sequences at each that autoscaling aims at (default: as many as run at the same time)"
    target = number(0, above=True)
    add("--replica-target-requests", type=target, metavar="X", help=said)
    said = "times that a request of which nothing was sent yet is tried again when its replica has "
    said += "died; 0 answers 503 at once (default: 1)"
    add("--replica-retries", type=integer(0), default=1, metavar="N", help=said)
    said = "sequences that a replica may have more than another one and still gets requests for "
    said += "the prefixes that it has cached (default: 8)"
    add("--replica-most-extra", type=integer(0), default=8, metavar="N", help=said)
    said = "GPUs of each, as Ray counts them (default: one, where there are any)"
    add("--replica-gpus", type=number(0), metavar="X", help=said)
    said = "a Ray cluster to run them on, as in HOST:6379 or auto (default: this machine alone)"
    add("--ray-address", metavar="ADDRESS", help=said)


def check_replica_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that contradict each other."""
    if args.replicas is None:
        for name, default in DEFAULTS.items():
            if getattr(args, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} does nothing without --replicas; give that too")
        return
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise ConfigError(
            f"--max-replicas {args.max_replicas} is below --replicas {args.replicas}; raise it"
        )
    if args.replica_target_requests is not None and args.max_replicas is None:
        raise ConfigError("--replica-target-requests does nothing without --max-replicas")
    if args.api_server_count != 1:
        raise ConfigError(
            f"--api-server-count {args.api_server_count} is for one engine, and does not go with "
            "--replicas yet; leave it out, or serve one engine without --replicas"
        )
    for name in ("enable_sleep_mode", "server_dev_mode"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is for one engine, and does not go with --replicas yet; leave it out, "
                "or serve one engine without --replicas"
            )
    if ":" in (args.device or "") and args.replicas > 1:
        raise ConfigError(
            f"--device {args.device} is one GPU and each replica has its own; use --device cuda"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--replicas needs Ray; install megatron-async[replicas]")


def serve_replicas(
    args: argparse.Namespace, config: EngineConfig, settings: FrontendSettings
) -> bool:
    """Serve until a signal comes; False when Ray has ended before."""
    from megatron_async.replicas.engine_replica import ReplicaSettings
    from megatron_async.replicas.ray_cluster import RayReplicas
    from megatron_async.replicas.ray_serve import Plan, frontend_of_replicas
    from megatron_async.serving.http.http_server import open_socket, serve, url_of
    from megatron_async.serving.http.http_server import run as run_loop
    from megatron_async.serving.http.logs import log_as_json
    from megatron_async.serving.tracing.provider import make_provider

    plan = Plan(
        replicas=args.replicas,
        max_replicas=args.max_replicas,
        target_requests=args.replica_target_requests or config.max_requests,
        gpus=args.replica_gpus,
        retries=args.replica_retries,
        most_extra=args.replica_most_extra,
    )
    replica = ReplicaSettings(
        model=args.model,
        config=dataclasses.asdict(config),
        max_queue=args.max_queue,
        max_restarts=args.max_restarts,
        shutdown_timeout=args.shutdown_timeout,
        stall_seconds=args.stall_seconds,
        across_hosts=args.ray_address is not None,
    )
    listening = open_socket(args.host, args.port)
    replicas = RayReplicas(replica, plan, address=args.ray_address)
    front, client = frontend_of_replicas(settings, plan, replicas)
    log_as_json()

    def say_ready() -> None:
        said = f"{args.model} by {args.replicas} replicas at {url_of(listening)}"
        print(f"{options.PROGRAM}: {said}", file=sys.stderr)

    provider = make_provider(settings.otlp_traces_endpoint)
    return run_loop(
        serve(front, client, replicas, listening, on_ready=say_ready, tracer_provider=provider)
    )
