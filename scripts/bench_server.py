"""Tokens a second of a ragged load over HTTP, as a share of those of the Python API.

    python scripts/bench_server.py --shape llama8b --requests 512 --max-requests 128 --json out.json
    python scripts/bench_server.py --model tiny --requests 64 --max-requests 16 \
        --prompt-range 16,128 --output-range 64,256

Two engines with the same options and weights are there at once, and their rounds alternate. In
process the caller drives the steps, all requests are there at the start, and texts are made. The
server is a process of its own; ``--concurrency`` streams are open at once (default: all).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from megatron_async import DynamicInferenceEngine, EngineConfig
from megatron_async.benchmark.command import length_range
from megatron_async.benchmark.measuring.loads import RaggedLoad, Request, arrivals
from megatron_async.benchmark.measuring.runs import request_figures, run_load
from megatron_async.benchmark.measuring.server_load import Target, figures, run_clients
from megatron_async.cli.options.options import DTYPES, FLAGS

START_SECONDS = 300
WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 8
SPEED = "output_tokens_per_second"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, a model directory, or random:SHAPE")
    add("--shape", help="as --model random:SHAPE")
    add("--device", help="default: a GPU where there is one")
    add("--dtype", choices=DTYPES)
    for name, default in (("requests", 512), ("max-requests", 128), ("depth", 1), ("rounds", 3)):
        add(f"--{name}", type=int, default=default)
    add("--prompt-range", type=length_range, default=(32, 2048), metavar="LOW,HIGH")
    add("--output-range", type=length_range, default=(16, 1024), metavar="LOW,HIGH")
    add("--block-count", type=int, help="KV blocks of each engine (default: as the engine's)")
    add("--concurrency", type=int, help="streams open at once (default: --requests)")
    add("--client-processes", type=int, default=1)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    args.model = f"random:{args.shape}" if args.shape else args.model
    return args


@contextlib.contextmanager
def server(args: argparse.Namespace, config: EngineConfig) -> Iterator[str]:
    """``megatron-async serve`` with the engine's options on a free port; its URL once it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = ("depth", "max_requests", "max_sequence_length", "block_count", "device", "dtype")
    given = {"--port": port, "--model": args.model, "--max-queue": args.requests}
    given |= {FLAGS.get(name, f"--{name}"): getattr(config, name) for name in names}
    command = [sys.executable, "-m", "megatron_async", "serve", "--no-enable-prefix-caching"]
    for name, value in given.items():
        command += [] if value is None else [name, str(value)]
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stderr=log) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not start: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def is_healthy(url: str) -> bool:
    """Whether requests can be served."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
        return True
    return False


def over_http(target: Target, requests: list[Request], args: Any) -> dict[str, Any]:
    """The figures of one round of clients."""
    at_once = arrivals(math.inf, len(requests), seed=0)
    streams = args.concurrency or len(requests)
    bodies = [target.encode(request) for request in requests]
    clients = (streams, args.client_processes, lambda answer: None)
    found: dict[str, Any] = figures(run_clients(target.server, bodies, at_once, *clients))
    return found


def main() -> None:
    """Measure, and print each round and the ratio of the medians."""
    args = parse_options()
    ranges = {"prompt_range": args.prompt_range, "output_range": args.output_range}
    load = RaggedLoad(requests=args.requests, max_requests=args.max_requests, **ranges)
    config = EngineConfig(
        depth=args.depth,
        max_requests=args.max_requests,
        max_sequence_length=load.longest,
        block_count=args.block_count,
        enable_prefix_caching=False,
        device=args.device,
        dtype=args.dtype,
    )
    python: list[dict[str, Any]] = []
    http: list[dict[str, Any]] = []
    engine = DynamicInferenceEngine.from_pretrained(args.model, config)
    with engine, server(args, config) as url:
        target = Target(url)
        requests = load.make_requests(target.vocab_size)
        few = [one.shortened(WARM_UP_TOKENS) for one in requests[:WARM_UP_REQUESTS]]
        run_load(engine, few)
        over_http(target, few, args)
        for _ in range(args.rounds):
            python.append(request_figures(run_load(engine, requests)))
            http.append(over_http(target, requests, args))
            said = f"tokens/s: Python {python[-1][SPEED]:.1f}, HTTP {http[-1][SPEED]:.1f}"
            print(said, http[-1]["errors"], flush=True)
    at = (args.rounds - 1) // 2
    ours, theirs = (sorted(runs, key=lambda run: run["seconds"])[at] for runs in (python, http))
    ratio = theirs[SPEED] / ours[SPEED]
    print(f"{args.model}, HTTP / Python: {ratio:.1%}. Median rounds of Python and HTTP:")
    for name in filter(ours.get, theirs):
        print(f"  {name:30} {ours[name]:12.3f} {theirs[name]:12.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"ratio": ratio, "options": vars(args), "python": python, "http": http}, file)


if __name__ == "__main__":
    main()
