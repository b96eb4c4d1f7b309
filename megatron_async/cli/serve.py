"""``megatron-async serve``: the text-generation server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options import options
from megatron_async.cli.options.server_keys import ADMIN_KEY_VARIABLE, KEY_VARIABLE, keys_of
from megatron_async.cli.options.values import integer, json_object, number
from megatron_async.cli.serve_replicas import add_replica_options, check_replica_options
from megatron_async.processes.watching.heartbeat import HEARTBEAT_SECONDS
from megatron_async.sampling_params import LOG_PROBS_MODES
from megatron_async.serving.engine_side.stall_watch import STALL_SECONDS

if TYPE_CHECKING:
    from megatron_async.serving.front_end.build import FrontendSettings
    from megatron_async.serving.http.frontend import ServerConfig
    from megatron_async.serving.messages import Endpoint

MAX_API_SERVERS = 64
FILES = 64
"""Open files of each of its processes, beside connections."""
BACKENDS = ("gloo", "nccl")
EXIT_GIVEN_UP = 1
"""The engine, or a front end, has died too often; wrong arguments are 2."""

_DESCRIPTION = """\
Serve a model over HTTP, as OpenAI's API: /v1/completions, /v1/chat/completions, /v1/responses,
/v1/models; Megatron's PUT /api; /health, /metrics, /tokenize. The engine runs in a process of its
own. SIGTERM and Ctrl-C stop accepting, let requests end, and exit with status 0.
"""


def add_command(commands: Any) -> None:
    """Add ``serve`` to the command line."""
    said = "serve a model over HTTP, as OpenAI's API"
    parser = commands.add_parser("serve", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run, takes_megatron_flags=True)
    add = parser.add_argument_group("server").add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    seconds: dict[str, Any] = {"metavar": "S"}
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    said = "0 takes a free one (default: 5000)"
    add("--port", type=integer(0, 65535), default=5000, help=said)
    said = "what clients call the model (default: --model as given)"
    add("--served-model-name", **several, metavar="NAME", help=said)
    said = f"clients must send one of these keys (default: those in {KEY_VARIABLE}, if any, with "
    said += "spaces between them; without keys everybody may, but not pause or change the engine)"
    add("--api-key", **several, metavar="KEY", help=said)
    said = (
        "who pauses or changes the engine must send one of these keys, which clients do not have "
    )
    said += f"(default: those in {ADMIN_KEY_VARIABLE}; without any, clients with a key may)"
    add("--admin-api-key", **several, metavar="KEY", help=said)
    said = "sequences that may wait beyond those that run; more are answered 429 (default: 1024)"
    add("--max-queue", type=integer(0), default=1024, metavar="N", help=said)
    said = "end a request after S seconds, with the text that it has (default: never)"
    add("--request-timeout", type=number(0, above=True), **seconds, help=said)
    said = "what requests are given to end when the server is stopped (default: 30)"
    add("--shutdown-timeout", type=number(0), default=30.0, **seconds, help=said)
    said = "processes that answer HTTP, all at the same port (default: 1)"
    count = integer(1, MAX_API_SERVERS)
    add("--api-server-count", type=count, default=1, metavar="N", help=said)
    said = "times within ten minutes that a process of the server is started again (default: 3)"
    add("--max-restarts", type=integer(0), default=3, metavar="N", help=said)
    said = "a process of the server that gives no sign of life for S seconds counts as frozen, is "
    said += f"killed and started again; 0 is never (default: {HEARTBEAT_SECONDS:g})"
    beats = number(0)
    add("--heartbeat-timeout", type=beats, default=HEARTBEAT_SECONDS, **seconds, help=said)
    said = "/health is 503 when requests have waited for S seconds without a step of the engine, "
    said += "and for nothing that is known (default: 60)"
    stall = number(0, above=True)
    add("--stall-seconds", type=stall, default=STALL_SECONDS, **seconds, help=said)
    said = "answer 503 when the engine's process cannot be had any more (default: exit with 1)"
    add("--keep-alive-on-engine-death", action="store_true", help=said)
    said = "web pages that may call the server; * is all (default: none)"
    add("--allow-origin", **several, metavar="ORIGIN", help=said)
    said = "share cached prefixes among requests of the same API key alone"
    add("--prefix-cache-per-key", action="store_true", help=said)
    said = "largest body of a request (default: 16)"
    add("--max-body-mib", type=integer(1), default=16, metavar="N", help=said)
    said = "send a trace of each request to this OTLP collector, as in "
    said += "http://localhost:4318/v1/traces (default: as the OTEL_* variables say, else none)"
    add("--otlp-traces-endpoint", metavar="URL", help=said)
    said = "publish which blocks the prefix cache knows, by ZeroMQ as vLLM does, as in "
    said += '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"} (default: no)'
    add("--kv-events-config", type=json_object, metavar="JSON", help=said)
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    said = "how the model writes tool calls (default: as its chat template says)"
    add("--tool-call-format", choices=("hermes", "llama3"), help=said)
    said = "how the model writes its thoughts, which answers then have as reasoning_content "
    said += "(default: they stay in the content)"
    formats = ("qwen3", "deepseek_r1", "glm45", "openai_gptoss")
    add("--reasoning-parser", choices=formats, help=said)
    said = "serve token ids alone, to /v1/completions; the model needs no tokenizer"
    add("--skip-tokenizer-init", action="store_true", help=said)
    add_replica_options(parser)
    said = "let clients put the engine to sleep: weights and KV cache give their memory back, and "
    said += "have it again at the same addresses"
    add("--enable-sleep-mode", action="store_true", help=said)
    said = "have vLLM's endpoints for trainers (/sleep, /update_weights and such); without keys "
    said += "whoever reaches the server may change the engine"
    add("--server-dev-mode", action="store_true", help=said)
    said = """what a trainer's collective runs on, as '{"backend": "nccl"}', or "gloo" on a CPU"""
    add("--weight-transfer-config", type=weight_transfer_backend, metavar="JSON", help=said)
    said = "take updates of some parameters from trainers that do not say that they are partial"
    add("--partial-weight-updates", action="store_true", help=said)
    said = "end requests that are aborted with the reason abort, as vLLM does, and not with length;"
    said += " so it is with --server-dev-mode"
    add("--abort-finish-reason", action="store_true", help=said)
    said = "log-probabilities of requests that do not say: the model's, or of the distribution "
    said += "that was sampled from, which trainers need (default: %(default)s)"
    modes = tuple(LOG_PROBS_MODES)
    add("--logprobs-mode", choices=modes, default=modes[0], help=said)
    options.add_model_options(parser)
    options.add_scheduling_options(parser, default="off")
    options.add_engine_options(parser, block_size_tokens=None)


def weight_transfer_backend(text: str) -> str:
    """The backend of vLLM's ``--weight-transfer-config``."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    backend = given.get("backend") if isinstance(given, dict) and len(given) == 1 else None
    if backend not in BACKENDS:
        known = " or ".join(f'{{"backend": "{name}"}}' for name in BACKENDS)
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be {known}")
    return str(backend)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from megatron_async.processes.limits import need_files
    from megatron_async.ranks.layout import Layout
    from megatron_async.ranks.open_files import check_files
    from megatron_async.serving.front_end.build import build_frontend
    from megatron_async.serving.front_end.front_ends import FrontEnds, serve_together
    from megatron_async.serving.http.http_server import open_socket, serve, url_of
    from megatron_async.serving.http.http_server import run as run_loop
    from megatron_async.serving.http.logs import log_as_json
    from megatron_async.serving.messages import Endpoint, Launch
    from megatron_async.serving.supervisor import Supervisor
    from megatron_async.serving.tracing.provider import make_provider

    depth = options.resolve_scheduling(args.inference_async_scheduling, args.depth, default=False)
    engine_config = options.engine_config(args, depth)
    need_files(FILES, "the server")
    check_files(Layout.of(engine_config))
    check_replica_options(args)
    config = _server_config(args)
    if args.replicas is not None:
        from megatron_async.cli.serve_replicas import serve_replicas

        settings = _frontend_settings(args, config, None)
        return 0 if serve_replicas(args, engine_config, settings) else EXIT_GIVEN_UP
    listening = open_socket(args.host, args.port)
    endpoint = Endpoint.private()
    settings = _frontend_settings(args, config, endpoint)
    launch = Launch(
        args.model,
        dataclasses.asdict(engine_config),
        endpoint,
        args.max_queue,
        stall_seconds=args.stall_seconds,
    )
    limits: dict[str, Any] = {"max_restarts": args.max_restarts}
    limits["heartbeat_timeout"] = args.heartbeat_timeout or None
    if not args.heartbeat_timeout:
        limits["start_timeout"] = None
    supervisor = Supervisor(launch, **limits)

    def say_ready() -> None:
        print(f"{options.PROGRAM}: {args.model} at {url_of(listening)}", file=sys.stderr)

    try:
        if args.api_server_count == 1:
            front, client = build_frontend(settings)
            log_as_json()
            serving = serve(
                front,
                client,
                supervisor,
                listening,
                on_ready=say_ready,
                tracer_provider=make_provider(settings.otlp_traces_endpoint),
            )
        else:
            front_ends = FrontEnds(settings, listening, args.api_server_count, **limits)
            log_as_json()
            serving = serve_together(front_ends, supervisor, on_ready=say_ready)
        return 0 if run_loop(serving) else EXIT_GIVEN_UP
    finally:
        endpoint.remove()


def _server_config(args: argparse.Namespace) -> ServerConfig:
    from megatron_async.serving.http.frontend import MIB, ServerConfig

    return ServerConfig(
        model_names=tuple(args.served_model_name) or (args.model,),
        api_keys=keys_of(args.api_key, KEY_VARIABLE),
        admin_api_keys=keys_of(args.admin_api_key, ADMIN_KEY_VARIABLE),
        allow_origins=tuple(args.allow_origin),
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        max_body_bytes=args.max_body_mib * MIB,
        stays_without_engine=args.keep_alive_on_engine_death,
        shows_aborts=args.abort_finish_reason or args.server_dev_mode,
        development=args.server_dev_mode,
        weight_transfer_backend=args.weight_transfer_config,
        partial_weight_updates=args.partial_weight_updates,
        prefix_cache_per_key=args.prefix_cache_per_key,
        logprobs_mode=args.logprobs_mode,
        sampling_defaults=options.sampling_defaults(args) or {},
    )


def _frontend_settings(
    args: argparse.Namespace, config: ServerConfig, endpoint: Endpoint | None
) -> FrontendSettings:
    from megatron_async.serving.front_end.build import FrontendSettings

    return FrontendSettings(
        model=args.model,
        tokenizer_model=args.tokenizer_model,
        endpoint=endpoint,
        config=config,
        chat_template=args.chat_template,
        tool_call_format=args.tool_call_format,
        reasoning_parser=args.reasoning_parser,
        skip_tokenizer_init=args.skip_tokenizer_init,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )
